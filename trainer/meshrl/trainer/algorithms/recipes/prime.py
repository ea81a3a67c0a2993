"""PRIME: process rewards from a language model that is trained on outcomes only, while the policy is.

Cui et al. 2025: β = 0.05, weights 5 and 5 of process and outcome, the reward model is updated before it scores,
four times as many prompts as needed, those of accuracy 0.2 to 0.8 are trained. Rewards must be 0 or 1.
"""

PAPER = "https://arxiv.org/abs/2502.01456"
DEFAULTS = {
    "algorithm": {
        "adv_estimator": "prime",
        "prime": {
            "beta_train": 0.05,
            "reward_dpo_coef": 5.0,
            "reward_gt_coef": 5.0,
            "optim": {"lr": 1e-6},
            "update": "before",
        },
        "filter_groups": {"enable": True, "low": 0.2, "high": 0.8, "oversample": 4.0},
    },
    "actor": {
        "clip_ratio": 0.2,
        "loss_agg_mode": "token-mean",
        "policy_loss": {"loss_mode": "vanilla"},
    },
    "rollout": {"n": 4},
}
