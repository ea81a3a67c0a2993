"""Inputs and results of policy losses, and the pieces that several losses share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from meshrl.trainer.algorithms.aggregation import Aggregator
from meshrl.trainer.algorithms.lazy_torch import Tensor, torch
from meshrl.trainer.algorithms.ragged import LOG_RATIO_BOUND, Ragged

if TYPE_CHECKING:
    from meshrl.trainer.config import ActorConfig as ActorConfig
else:  # it is put together from the options beside the formulas
    ActorConfig = Any


@dataclass(frozen=True, kw_only=True, slots=True)
class LossInputs:
    """One micro-batch."""

    ragged: Ragged
    logprobs: Tensor
    """float32[N]: log π_θ of the sampled tokens; carries the gradient."""
    old_logprobs: Tensor
    """float32[N]: log π_old, the proximal policy that ratios are clipped around."""
    advantages: Tensor
    """float32[N]"""
    rollout_is_weights: Tensor | None = None
    """float32[N]: multiplies the loss of each token; see rollout_correction."""
    ref_logprobs: Tensor | None = None
    """float32[N]"""


@dataclass(frozen=True, kw_only=True, slots=True)
class LossOutput:
    """Result of a policy loss."""

    loss: Tensor
    """Scalar; micro-batch losses add up to the mini-batch's."""
    metrics: Mapping[str, Tensor] = field(default_factory=dict)
    """Detached scalars: means over the trained tokens given, so weigh micro-batches by `ragged.num_valid`."""


class PolicyLoss(Protocol):
    """A module of this package.

    It may also have `Options` (`algorithms.options`) and these literals, which are read without importing it:

    NEEDS         fields of LossInputs that must be given, besides those without a default
    REQUIRED      keys of `actor.policy_loss` that have no default
    OF_ROWS       True: one advantage of a row is read, not one of each token
    WHOLE_GROUPS  True: the rows of a group must be in one micro-batch
    DEFAULTS      what `algorithm.name` sets where it names the module, or its NAME (`recipe_defaults`)
    """

    def compute(self, inputs: LossInputs, config: ActorConfig, aggregate: Aggregator) -> LossOutput:
        """Compute the loss of a micro-batch."""
        ...


def clip_range(config: ActorConfig) -> tuple[float, float]:
    """(ε_low, ε_high), each falling back to `clip_ratio`."""
    low, high = config.clip_ratio_low, config.clip_ratio_high
    return (
        config.clip_ratio if low is None else low,
        config.clip_ratio if high is None else high,
    )


def log_ratio(inputs: LossInputs, *, clamp: bool = True) -> Tensor:
    """The log of the ratio, d = log π_θ - log π_old, [N]."""
    d = inputs.logprobs - inputs.old_logprobs
    return d.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND) if clamp else d


def weighted(loss: Tensor, weights: Tensor | None) -> Tensor:
    """The loss per token times its importance weight, if there is one."""
    return loss if weights is None else loss * weights


def mean_metrics(ragged: Ragged, **values: Tensor) -> dict[str, Tensor]:
    """`actor/<name>`: the mean of each [N] over trained tokens."""
    with torch.no_grad():
        return {
            f"actor/{name}": ragged.token_mean(value.detach().to(torch.float32))
            for name, value in values.items()
        }
