"""ReMax: the baseline of a prompt is the reward of its greedy response.

Li et al. 2023, https://arxiv.org/abs/2310.10505, algorithm 1:

    R_t = Σ_{t' ≥ t} r_t'
    A_t = R_t - b,    b = reward of the response decoded greedily
"""

from __future__ import annotations

import torch

from meshrl.trainer.algorithms.advantages._types import AdvantageBatch, Advantages, need
from meshrl.trainer.config import AlgorithmConfig

NEEDS = ("reward_baselines",)


def compute(batch: AdvantageBatch, config: AlgorithmConfig) -> Advantages:
    """Advantages and returns; nothing in `config` is read.

    Raises:
        ConfigError: no greedy rewards.
    """
    ragged = batch.ragged
    b = need(batch.reward_baselines, "reward_baselines", "remax")
    r = torch.where(ragged.mask, batch.token_rewards, 0.0)
    R = torch.where(ragged.mask, ragged.suffix_sum(r), 0.0)
    return Advantages(advantages=R - ragged.to_tokens(b), returns=R)
