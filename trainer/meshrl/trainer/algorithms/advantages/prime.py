"""PRIME: leave-one-out over process rewards of an implicit reward model and over the verifier's outcome.

Cui et al. 2025, https://arxiv.org/abs/2502.01456, with r_t the implicit process reward β log (π_φ/π_ref)_t
of `implicit_reward` and acc the outcome in {0, 1}:

    RLOO(r)_t = n/(n - 1) r_t - 1/(n - 1) Σ_j mean_t(r^j)          n rows of the group
    R_t = Σ_{t' ≥ t} [ c_dpo RLOO(r)_t' + c_gt RLOO(acc at the last token)_t' ]
    A   = whiten(R)                                                over the trained tokens of the whole batch
"""

from __future__ import annotations

import torch
from torch import Tensor

from meshrl.trainer.algorithms.advantages._options.prime import Options
from meshrl.trainer.algorithms.advantages._types import (
    AdvantageBatch,
    Advantages,
    group_metrics,
    need,
    outcome_rewards,
)
from meshrl.trainer.algorithms.options import options
from meshrl.trainer.algorithms.ragged import Ragged, whiten
from meshrl.trainer.config import AlgorithmConfig

NEEDS = ("implicit_rewards",)
ACCURACY = "acc"
"""The reward component that is the outcome; without it the reward itself is."""


def compute(batch: AdvantageBatch, config: AlgorithmConfig) -> Advantages:
    """Whitened advantages and their returns.

    Raises:
        ConfigError: no implicit rewards.
    """
    ragged, prime = batch.ragged, options(config, Options).prime
    r = need(batch.implicit_rewards, "implicit_rewards", "prime")
    acc = batch.reward_components.get(ACCURACY, batch.scores)
    outcome = outcome_rewards(ragged, acc)
    at_end = outcome_rewards(ragged, torch.ones_like(acc)) > 0
    source = prime.reward_dpo_coef * leave_one_out(ragged, r)
    source = source + prime.reward_gt_coef * leave_one_out(ragged.with_mask(at_end), outcome)
    R = ragged.suffix_sum(torch.where(ragged.mask, source, 0.0))
    returns = torch.where(ragged.mask, R, 0.0).float()
    return Advantages(
        advantages=whiten(ragged, returns), returns=returns, metrics=group_metrics(batch)
    )


def leave_one_out(ragged: Ragged, r: Tensor) -> Tensor:
    """RLOO(r) float64[N] of rewards at the trained tokens of `ragged`; 0 elsewhere and for lone rows."""
    r = r.double()
    n = ragged.group_counts[ragged.groups].double()
    row_mean = ragged.row_sum(r) / ragged.valid_lengths.clamp(min=1)
    others = (n - 1).clamp(min=1)
    b = ragged.group_sum(row_mean)[ragged.groups] / others
    centred = r * (n / others)[ragged.rows] - b[ragged.rows]
    return torch.where(ragged.mask & ~ragged.alone[ragged.rows], centred, 0.0)
