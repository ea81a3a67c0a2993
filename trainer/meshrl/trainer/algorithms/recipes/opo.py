"""OPO: exactly on-policy REINFORCE with the length-weighted baseline that minimises the gradient's variance.

Hao et al. 2025: no clip, no KL, no entropy bonus; `queue.max_staleness` is 0, because the loss has no ratio.
"""

PAPER = "https://arxiv.org/abs/2505.23585"
DEFAULTS = {
    "algorithm": {"adv_estimator": "opo"},
    "actor": {
        "loss_agg_mode": "token-mean",
        "policy_loss": {"loss_mode": "reinforce"},
        "use_kl_loss": False,
        "entropy_coeff": 0.0,
    },
    "rollout": {"n": 8},
    "queue": {"max_staleness": 0},
}
