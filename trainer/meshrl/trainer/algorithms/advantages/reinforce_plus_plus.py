"""REINFORCE++: discounted returns, whitened over the whole batch instead of a critic or groups.

Hu 2025, https://arxiv.org/abs/2501.03262:

    R_t = r_t + γ R_{t+1}
    A = whiten(R)                         over the trained tokens of the whole batch

r usually carries the KL penalty (`use_kl_in_reward`). t counts trained tokens.
"""

from __future__ import annotations

import torch

from meshrl.trainer.algorithms.advantages._types import AdvantageBatch, Advantages
from meshrl.trainer.algorithms.ragged import whiten
from meshrl.trainer.config import AlgorithmConfig

NEEDS: tuple[str, ...] = ()


def compute(batch: AdvantageBatch, config: AlgorithmConfig) -> Advantages:
    """Whitened advantages and the discounted returns."""
    ragged = batch.ragged
    r = batch.token_rewards[ragged.mask].double()
    R = ragged.valid_only().discounted_suffix_sum(r, torch.full_like(r, config.gamma))
    returns = ragged.from_valid(R.float())
    return Advantages(advantages=whiten(ragged, returns), returns=returns)
