"""Dr. GRPO: GRPO without its two biases, the division by the group's deviation and by each response's length.

Liu et al. 2025. The sum of a response is divided by a constant: `actor.loss_scale_factor`, or the longest response
that is allowed. No KL.
"""

PAPER = "https://arxiv.org/abs/2503.20783"
DEFAULTS = {
    "algorithm": {"adv_estimator": "dr_grpo"},
    "actor": {
        "clip_ratio": 0.2,
        "loss_agg_mode": "seq-mean-token-sum-norm",
        "policy_loss": {"loss_mode": "vanilla"},
        "use_kl_loss": False,
    },
    "rollout": {"n": 8},
}
