"""HGPO: for agents: a step is judged against steps with its observation, and more so if they share its history.

He et al. 2026, with two observations of history, weights that grow linearly and γ = 0.95; the KL term as in GiGPO.
"""

PAPER = "https://arxiv.org/abs/2602.22817"
DEFAULTS = {
    "algorithm": {
        "adv_estimator": "hgpo",
        "gamma": 0.95,
        "hgpo": {"history_length": 2, "length_weight_alpha": 1.0, "mode": "mean_norm"},
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
