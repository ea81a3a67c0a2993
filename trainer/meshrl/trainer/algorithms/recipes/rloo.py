"""RLOO: REINFORCE with the mean of the other responses as the baseline, KL in the reward, no clip.

Ahmadian et al. 2024, with β = 0.03 (their TL;DR setting). Asynchronous rows are weighed by a truncated
π_old/π_rollout; with `queue.max_staleness: 0` the weights are 1 up to rounding.
"""

PAPER = "https://arxiv.org/abs/2402.14740"
DEFAULTS = {
    "algorithm": {
        "adv_estimator": "rloo",
        "use_kl_in_reward": True,
        "kl_ctrl": {"type": "fixed", "kl_coef": 0.03},
        "rollout_correction": {"rollout_is": "token", "rollout_is_threshold": 2.0},
    },
    "actor": {"loss_agg_mode": "token-mean", "policy_loss": {"loss_mode": "reinforce"}},
    "rollout": {"n": 4},
}
