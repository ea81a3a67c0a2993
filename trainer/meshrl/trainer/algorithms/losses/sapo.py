"""SAPO: a soft gate instead of a clip.

Gao et al. 2025, https://arxiv.org/abs/2511.20347:

    l = -A · σ(τ (ρ - 1)) · 4/τ,     τ = τ_pos if A > 0 else τ_neg

The gate's slope at ρ = 1 is 1, as a ratio's, and fades with distance; τ_neg > τ_pos fades negative updates
sooner. The paper averages rows: `loss_agg_mode: seq-mean-token-mean`, which verl's conventions force.
"""

from __future__ import annotations

import dataclasses

import torch

from meshrl.trainer.algorithms.aggregation import Aggregator
from meshrl.trainer.algorithms.losses._options.sapo import Options
from meshrl.trainer.algorithms.losses._types import (
    LossInputs,
    LossOutput,
    log_ratio,
    mean_metrics,
    weighted,
)
from meshrl.trainer.algorithms.options import options
from meshrl.trainer.config import ActorConfig

NEEDS: tuple[str, ...] = ()


def compute(inputs: LossInputs, config: ActorConfig, aggregate: Aggregator) -> LossOutput:
    """Gated policy loss."""
    ragged, A = inputs.ragged, inputs.advantages
    if config.conventions == "verl":
        aggregate = dataclasses.replace(aggregate, mode="seq-mean-token-mean")
    p = options(config.policy_loss, Options)
    tau = torch.where(A > 0, p.tau_pos, p.tau_neg)
    d = log_ratio(inputs)
    gate = torch.sigmoid(tau * (d.exp() - 1)) * (4 / tau)
    loss = -gate * A
    never = torch.zeros_like(loss)
    return LossOutput(
        loss=aggregate(weighted(loss, inputs.rollout_is_weights), ragged),
        metrics=mean_metrics(ragged, pg_clipfrac=never, ppo_kl=-d, pg_clipfrac_lower=never),
    )
