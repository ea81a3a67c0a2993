"""ReMax: REINFORCE whose baseline is the reward of the prompt's greedy response.

Li et al. 2023, algorithm 1. Each prompt gets one more row, sampled greedily by the same engines; it is scored, not
trained. Asynchronous rows are weighed as in RLOO.
"""

PAPER = "https://arxiv.org/abs/2310.10505"
DEFAULTS = {
    "algorithm": {
        "adv_estimator": "remax",
        "use_kl_in_reward": True,
        "kl_ctrl": {"type": "fixed", "kl_coef": 0.01},
        "rollout_correction": {"rollout_is": "token", "rollout_is_threshold": 2.0},
    },
    "actor": {"loss_agg_mode": "token-mean", "policy_loss": {"loss_mode": "reinforce"}},
    "rollout": {"n": 1},
}
