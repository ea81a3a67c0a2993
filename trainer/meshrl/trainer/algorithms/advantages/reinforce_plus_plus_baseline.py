"""REINFORCE++-baseline: the group's mean off, then whitened over the whole batch.

Hu 2025, https://arxiv.org/abs/2501.03262:

    A = whiten(s_i - mean_g(s))           over the trained tokens of the whole batch

The batch's spread replaces GRPO's division by each group's own.
"""

from __future__ import annotations

from meshrl.trainer.algorithms.advantages._types import (
    AdvantageBatch,
    Advantages,
    AlgorithmConfig,
    group_metrics,
)
from meshrl.trainer.algorithms.advantages.grpo import group_relative
from meshrl.trainer.algorithms.ragged import whiten

GROUP_BASELINE = True


def compute(batch: AdvantageBatch, config: AlgorithmConfig) -> Advantages:
    """Whitened advantages; a row without siblings has 0 before whitening (verl: its reward)."""
    ragged = batch.ragged
    centred = group_relative(
        ragged, batch.scores, divide_by_std=False, conventions=config.conventions
    )
    A = whiten(ragged, ragged.to_tokens(centred.float()))
    return Advantages(advantages=A, returns=A, metrics=group_metrics(batch))
