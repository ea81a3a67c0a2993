"""REINFORCE++: no critic and no group: returns with KL in the reward, whitened over the batch, clipped like PPO.

Hu et al. 2025, with k1 as the KL estimator and β = 0.01.
"""

PAPER = "https://arxiv.org/abs/2501.03262"
DEFAULTS = {
    "algorithm": {
        "adv_estimator": "reinforce_plus_plus",
        "gamma": 1.0,
        "use_kl_in_reward": True,
        "kl_penalty": "k1",
        "kl_ctrl": {"type": "fixed", "kl_coef": 0.01},
    },
    "actor": {
        "clip_ratio": 0.2,
        "loss_agg_mode": "token-mean",
        "policy_loss": {"loss_mode": "vanilla"},
    },
    "rollout": {"n": 1},
}
