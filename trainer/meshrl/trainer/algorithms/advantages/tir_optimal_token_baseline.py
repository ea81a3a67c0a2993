"""Optimal token baseline for responses with tool turns: positions count sampled tokens only.

Li et al. 2026, https://arxiv.org/abs/2602.07078; the formulas are those of `optimal_token_baseline`. Rows of a
group call tools at different places, so column t of one row would meet an observation of another: the k-th
sampled token of a row is compared with the k-th of its siblings instead. Rows without a sampled token are
nobody's siblings.
"""

from __future__ import annotations

from meshrl.trainer.algorithms.advantages._types import AdvantageBatch, Advantages, AlgorithmConfig
from meshrl.trainer.algorithms.advantages.optimal_token_baseline import (
    Options,
    baseline,
    energies,
    finish,
)
from meshrl.trainer.algorithms.options import options

NEEDS = ("old_logprobs", "sum_pi_squared")
GROUP_BASELINE = True


def compute(batch: AdvantageBatch, config: AlgorithmConfig) -> Advantages:
    """Advantages and returns.

    Raises:
        ConfigError: no old log-probs or no Σπ².
    """
    ragged = batch.ragged
    G, W = energies(batch, "algorithm.adv_estimator tir_optimal_token_baseline")
    alone = ragged.group_sum(ragged.nonempty.long())[ragged.groups] < 2
    squeezed = baseline(
        ragged.valid_only(),
        G[ragged.mask],
        W[ragged.mask],
        alone=alone,
        zero_tail=options(config, Options).otb_handle_zero_tail,
    )
    return finish(batch, G, ragged.from_valid(squeezed), config)
