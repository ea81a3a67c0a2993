"""GSPO: the ratio of whole responses, normalised by length, is clipped in a very narrow range.

Zheng et al. 2025, eq. 5 and section 5.1: ε 3e-4 below and 4e-4 above, each response weighs the same, no KL.
"""

PAPER = "https://arxiv.org/abs/2507.18071"
DEFAULTS = {
    "algorithm": {"adv_estimator": "grpo"},
    "actor": {
        "clip_ratio_low": 3e-4,
        "clip_ratio_high": 4e-4,
        "loss_agg_mode": "seq-mean-token-mean",
        "policy_loss": {"loss_mode": "gspo"},
    },
    "rollout": {"n": 8},
}
