"""ReMax: the baseline of a prompt is the reward of its greedy response.

Li et al. 2023, https://arxiv.org/abs/2310.10505, algorithm 1:

    R_t = Σ_{t' ≥ t} r_t'
    A_t = R_t - b,    b = reward of the response decoded greedily
"""

from __future__ import annotations

from meshrl.trainer.algorithms.advantages._types import AdvantageBatch, Advantages, AlgorithmConfig
from meshrl.trainer.algorithms.lazy_torch import torch
from meshrl.trainer.algorithms.options import need

NEEDS = ("reward_baselines",)
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
"""Algorithm 1. Each prompt gets one more row, sampled greedily by the same engines; it is scored, not
trained. Asynchronous rows are weighed as in RLOO."""


def compute(batch: AdvantageBatch, config: AlgorithmConfig) -> Advantages:
    """Advantages and returns; nothing in `config` is read.

    Raises:
        ConfigError: no greedy rewards.
    """
    ragged = batch.ragged
    b = need(batch.reward_baselines, "reward_baselines", "algorithm.adv_estimator remax")
    r = torch.where(ragged.mask, batch.token_rewards, 0.0)
    R = torch.where(ragged.mask, ragged.suffix_sum(r), 0.0)
    return Advantages(advantages=R - ragged.to_tokens(b), returns=R)
