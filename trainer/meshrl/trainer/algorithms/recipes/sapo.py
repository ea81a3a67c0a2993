"""SAPO: a soft gate around ratio 1 instead of a clip, narrower for negative advantages.

Gao et al. 2025, eqs. 5-8: τ_pos = 1, τ_neg = 1.05, each response weighs the same.
"""

PAPER = "https://arxiv.org/abs/2511.20347"
DEFAULTS = {
    "algorithm": {"adv_estimator": "grpo"},
    "actor": {
        "loss_agg_mode": "seq-mean-token-mean",
        "policy_loss": {"loss_mode": "sapo", "tau_pos": 1.0, "tau_neg": 1.05},
    },
    "rollout": {"n": 8},
}
