"""DRO: direct reward optimisation, a policy gradient with a quadratic penalty.

Richemond et al. 2024, https://arxiv.org/abs/2405.19107:

    l = -(A log π_θ - β/2 (log π_θ - log π_old)²)

β is `policy_loss.dro_beta`, which has no default.
"""

from __future__ import annotations

from pydantic import PositiveFloat

from meshrl.common.config import Config
from meshrl.contract.errors import ConfigError
from meshrl.trainer.algorithms.aggregation import Aggregator
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

    dro_beta: PositiveFloat | None = None
    """Required by `dro`."""


REQUIRED = ("dro_beta",)


def compute(inputs: LossInputs, config: ActorConfig, aggregate: Aggregator) -> LossOutput:
    """Policy loss.

    Raises:
        ConfigError: no β.
    """
    beta = options(config.policy_loss, Options).dro_beta
    if beta is None:
        raise ConfigError("loss_mode dro needs actor.policy_loss.dro_beta, a positive number")
    d = log_ratio(inputs, clamp=False)
    loss = -(inputs.logprobs * inputs.advantages - beta / 2 * d.square())
    return LossOutput(
        loss=aggregate(weighted(loss, inputs.rollout_is_weights), inputs.ragged),
        metrics=mean_metrics(inputs.ragged, ppo_kl=-d),
    )
