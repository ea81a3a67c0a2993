"""VAPO: PPO for long chains of thought: a pre-trained critic, two λ, clip higher, NLL on correct answers.

Yue et al. 2025: 50 steps of value pre-training on Monte Carlo returns, λ = 1 for the critic, 1 - 1/(0.05 L) for the
actor, ε 0.2/0.28, token-level loss, weight 0.1 of the NLL, groups of 16, learning rates 1e-6 and 2e-6.
"""

PAPER = "https://arxiv.org/abs/2504.05118"
DEFAULTS = {
    "algorithm": {
        "adv_estimator": "vapo",
        "gamma": 1.0,
        "vapo": {"alpha": 0.05},
    },
    "actor": {
        "clip_ratio_low": 0.2,
        "clip_ratio_high": 0.28,
        "loss_agg_mode": "token-mean",
        "policy_loss": {"loss_mode": "vanilla", "positive_nll_coef": 0.1},
    },
    "critic": {"optim": {"lr": 2e-6}, "pretrain_steps": 50},
    "rollout": {"n": 16},
}
