"""Pass@k GRPO: only the best response of a group is paid, by its lead over the second best.

Tang et al. 2025, https://arxiv.org/abs/2503.19595:

    A_best = (s_best - s_second) / (std_g(s) + ε),   every other A = 0

A tie for the best leaves no lead. `norm_adv_by_std_in_grpo: false` drops the division.
"""

from __future__ import annotations

from meshrl.contract.errors import ConfigError
from meshrl.trainer.algorithms.advantages._types import (
    AdvantageBatch,
    Advantages,
    AlgorithmConfig,
    broadcast,
)
from meshrl.trainer.algorithms.advantages.grpo import EPSILON, Options
from meshrl.trainer.algorithms.lazy_torch import Tensor, torch
from meshrl.trainer.algorithms.options import options
from meshrl.trainer.algorithms.ragged import Ragged

GROUP_BASELINE = True


def compute(batch: AdvantageBatch, config: AlgorithmConfig) -> Advantages:
    """Advantages of whole responses.

    Raises:
        ConfigError: a group of one row under verl's conventions; otherwise that row gets 0.
    """
    ragged = batch.ragged
    if config.conventions == "verl" and bool(ragged.alone.any()):
        group = int(ragged.groups[ragged.alone][0])
        raise ConfigError(f"grpo_passk needs two rows per group, group {group} has one")
    divide = options(config, Options).norm_adv_by_std_in_grpo
    return broadcast(batch, lead(ragged, batch.scores, divide_by_std=divide))


def lead(ragged: Ragged, s: Tensor, *, divide_by_std: bool) -> Tensor:
    """A [B] from s [B]."""
    s = s.double()
    g = ragged.groups
    winner = ragged.first_of_group(s == ragged.group_max(s)[g])
    second = ragged.group_max(torch.where(winner, -torch.inf, s))[g]
    A = torch.where(winner & ~ragged.alone, s - second, 0.0)
    return A / (ragged.group_std(s)[g] + EPSILON) if divide_by_std else A
