"""SPPO: regress a row's log-ratio on its advantage.

Wu et al. 2024, https://arxiv.org/abs/2405.00675:

    l_i = ( Σ_t log π_θ - Σ_t log π_old - η A_i )²,      mean over rows

A_i comes from `adv_estimator: sppo`; η is `policy_loss.sppo_eta`. `loss_agg_mode` is not read.
"""

from __future__ import annotations

from pydantic import PositiveFloat

from meshrl.common.config import Config
from meshrl.trainer.algorithms.aggregation import Aggregator
from meshrl.trainer.algorithms.losses._types import (
    ActorConfig,
    LossInputs,
    LossOutput,
    log_ratio,
    mean_metrics,
)
from meshrl.trainer.algorithms.options import options


class Options(Config):
    """Keys of `actor.policy_loss`."""

    sppo_eta: PositiveFloat = 1.0
    """Scale of the advantage that a row's log-ratio is regressed on."""


OF_ROWS = True


def compute(inputs: LossInputs, config: ActorConfig, aggregate: Aggregator) -> LossOutput:
    """Squared error of whole rows."""
    ragged = inputs.ragged
    d = log_ratio(inputs, clamp=False)
    A = ragged.row_mean(inputs.advantages)
    eta = options(config.policy_loss, Options).sppo_eta
    loss = (ragged.row_sum(d) - eta * A).square()
    return LossOutput(
        loss=aggregate.over_rows(loss, ragged), metrics=mean_metrics(ragged, ppo_kl=-d)
    )
