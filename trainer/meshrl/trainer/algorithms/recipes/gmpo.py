"""GMPO: the geometric mean of token ratios, which one outlier does not move; clipped token by token in log space.

Zhao et al. 2025, https://arxiv.org/abs/2507.20673, eq. 4 and section 4: the range is (e^-0.4, e^0.4).
"""

DEFAULTS = {
    "algorithm": {"adv_estimator": "grpo"},
    "actor": {
        "clip_ratio_low": 0.4,
        "clip_ratio_high": 0.4,
        "policy_loss": {"loss_mode": "geo_mean"},
    },
    "rollout": {"n": 8},
}
