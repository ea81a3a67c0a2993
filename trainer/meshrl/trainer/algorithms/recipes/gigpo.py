"""GiGPO: for agents: an episode is judged against its group, each step against steps from the same observation.

Feng et al. 2025, with ω = 1, γ = 0.95 and means without deviations (`mean_norm`, their default). A row is an episode,
its steps are what the policy said between two observations.
"""

PAPER = "https://arxiv.org/abs/2505.10978"
DEFAULTS = {
    "algorithm": {
        "adv_estimator": "gigpo",
        "gamma": 0.95,
        "gigpo": {"step_advantage_w": 1.0, "mode": "mean_norm"},
    },
    "actor": {
        "clip_ratio": 0.2,
        "loss_agg_mode": "token-mean",
        "policy_loss": {"loss_mode": "vanilla"},
        "use_kl_loss": True,
        "kl_loss_coef": 0.01,
    },
    "rollout": {"n": 8},
}
