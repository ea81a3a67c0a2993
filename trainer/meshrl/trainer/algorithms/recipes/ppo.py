"""PPO with a learned critic: dense credit by GAE, a clipped ratio, a clipped value loss.

Schulman et al. 2017; λ = 0.95 and γ = 1 are what language models use (Ouyang et al. 2022). The critic's head starts
at 0; `critic.warmup_steps` lets it learn before the policy moves.
"""

PAPER = "https://arxiv.org/abs/1707.06347"
DEFAULTS = {
    "algorithm": {"adv_estimator": "gae", "gamma": 1.0, "lam": 0.95},
    "actor": {
        "clip_ratio": 0.2,
        "loss_agg_mode": "token-mean",
        "policy_loss": {"loss_mode": "vanilla"},
    },
    "critic": {"optim": {"lr": 1e-5}, "cliprange_value": 0.5},
    "rollout": {"n": 1},
}
