"""SAPO: a soft gate instead of a clip.

Gao et al. 2025, https://arxiv.org/abs/2511.20347:

    l = -A · σ(τ (ρ - 1)) · 4/τ,     τ = τ_pos if A > 0 else τ_neg

The gate's slope at ρ = 1 is 1, as a ratio's, and fades with distance; τ_neg > τ_pos fades negative updates
sooner. The paper averages rows: `loss_agg_mode: seq-mean-token-mean`, which verl's conventions force.
"""

from __future__ import annotations

import dataclasses

from meshrl.common.config import Config
from meshrl.trainer.algorithms.aggregation import Aggregator
from meshrl.trainer.algorithms.lazy_torch import torch
from meshrl.trainer.algorithms.losses._types import (
    ActorConfig,
    LossInputs,
    LossOutput,
    log_ratio,
    mean_metrics,
    weighted,
)
from meshrl.trainer.algorithms.options import options


class Options(Config):
    """Keys of `actor.policy_loss`."""

    tau_pos: float = 1.0
    """SAPO's gate for positive advantages."""
    tau_neg: float = 1.05
    """SAPO's gate for the others."""


DEFAULTS = {
    "algorithm": {"adv_estimator": "grpo"},
    "actor": {
        "loss_agg_mode": "seq-mean-token-mean",
        "policy_loss": {"loss_mode": "sapo", "tau_pos": 1.0, "tau_neg": 1.05},
    },
    "rollout": {"n": 8},
}
"""Eqs. 5-8: τ_pos = 1, τ_neg = 1.05, each response weighs the same."""


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
