"""RLOO: the baseline of a response is the mean of its siblings.

Ahmadian et al. 2024, https://arxiv.org/abs/2402.14740:

    A_i = s_i - 1/(n - 1) Σ_{j ≠ i} s_j  =  (s_i - mean_g(s)) · n/(n - 1)
"""

from __future__ import annotations

import torch
from torch import Tensor

from meshrl.trainer.algorithms.advantages._types import AdvantageBatch, Advantages, broadcast
from meshrl.trainer.algorithms.ragged import Ragged
from meshrl.trainer.config import AlgorithmConfig

NEEDS: tuple[str, ...] = ()
GROUP_BASELINE = True


def compute(batch: AdvantageBatch, config: AlgorithmConfig) -> Advantages:
    """Advantages of whole responses.

    A row without siblings gets 0; under verl's conventions its reward.
    """
    A = leave_one_out(batch.ragged, batch.scores)
    if config.conventions == "verl":
        A = torch.where(batch.ragged.alone, batch.scores.double(), A)
    return broadcast(batch, A)


def leave_one_out(ragged: Ragged, s: Tensor) -> Tensor:
    """A [B] from s [B]; 0 for a row without siblings."""
    s = s.double()
    g = ragged.groups
    n = ragged.group_counts[g]
    return (s - ragged.group_mean(s)[g]) * n / (n - 1).clamp(min=1)
