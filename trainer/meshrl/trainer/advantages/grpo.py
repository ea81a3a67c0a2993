"""GRPO: a response is as good as its distance from the mean of its group.

Shao et al. 2024, DeepSeekMath, https://arxiv.org/abs/2402.03300, section 4.1.2:

    A_i = (s_i - mean_g(s)) / (std_g(s) + ε)

with s_i the response's reward and std unbiased. `norm_adv_by_std_in_grpo=False` drops the division (Dr. GRPO).
"""

from __future__ import annotations

import torch
from torch import Tensor

from meshrl.trainer.advantages._types import AdvantageBatch, Advantages, broadcast
from meshrl.trainer.config import AlgorithmConfig, Conventions
from meshrl.trainer.ragged import Ragged

NEEDS: tuple[str, ...] = ()
EPSILON = 1e-6


def compute(batch: AdvantageBatch, config: AlgorithmConfig) -> Advantages:
    """Advantages of whole responses, the same at each of a row's trained tokens."""
    row_advantages = group_relative(
        batch.ragged,
        batch.scores,
        divide_by_std=config.norm_adv_by_std_in_grpo,
        conventions=config.conventions,
    )
    return broadcast(batch, row_advantages)


def group_relative(
    ragged: Ragged,
    s: Tensor,
    *,
    divide_by_std: bool,
    conventions: Conventions,
    epsilon: float = EPSILON,
) -> Tensor:
    """A [B] from s [B].

    A row without siblings gets 0; verl takes mean 0 and std 1 there and returns s / (1 + ε).
    """
    s = s.double()
    g = ragged.groups
    mean, std = ragged.group_mean(s)[g], ragged.group_std(s)[g]
    if conventions == "verl":
        mean = torch.where(ragged.alone, 0.0, mean)
        std = torch.where(ragged.alone, 1.0, std)
    return (s - mean) / (std + epsilon) if divide_by_std else s - mean
