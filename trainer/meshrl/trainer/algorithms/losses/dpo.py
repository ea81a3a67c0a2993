"""DPO on pairs of responses, offline or chosen by reward while training.

Rafailov et al. 2023, https://arxiv.org/abs/2305.18290, eq. 7; label smoothing λ: Mitchell 2023,
https://ericmitchell.ai/cdpo.pdf. h is the log-ratio margin of the chosen over the rejected row of a group:

    h = (log π_θ(y_c) - log π_θ(y_r)) - (log π_ref(y_c) - log π_ref(y_r))      sums over the trained tokens
    l = -(1 - λ) log σ(β h) - λ log σ(-β h)

The sign of a row's advantage says whether it is chosen (+), rejected (-) or neither (0): see advantages/preference. A
pair must meet in one micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable

from pydantic import NonNegativeFloat, PositiveFloat

from meshrl.common.config import Config
from meshrl.contract.errors import InfraError
from meshrl.trainer.algorithms.aggregation import Aggregator
from meshrl.trainer.algorithms.lazy_torch import Tensor, torch
from meshrl.trainer.algorithms.losses._types import ActorConfig, LossInputs, LossOutput
from meshrl.trainer.algorithms.options import need, options


class Options(Config):
    """Keys of `actor.policy_loss`."""

    dpo_beta: PositiveFloat = 0.1
    """β of `dpo`, `ipo` and `spin`."""
    dpo_label_smoothing: NonNegativeFloat = 0.0
    """Probability that a preference is the wrong way round (conservative DPO)."""
    dpo_reference_free: bool = False
    """Leave the reference model out of `dpo` and `ipo`."""


NEEDS = ("ref_logprobs",)
OF_ROWS = True
WHOLE_GROUPS = True


def compute(inputs: LossInputs, config: ActorConfig, aggregate: Aggregator) -> LossOutput:
    """Preference loss; raises what `compute_with` raises."""
    p = options(config.policy_loss, Options)

    def of_margin(h: Tensor) -> Tensor:
        return pair_loss(h, beta=p.dpo_beta, label_smoothing=p.dpo_label_smoothing)

    return compute_with(of_margin, inputs, p, aggregate, "dpo")


def pair_loss(h: Tensor, *, beta: float, label_smoothing: float = 0.0) -> Tensor:
    """L of margins h, any shape."""
    ls, log_sigmoid = label_smoothing, torch.nn.functional.logsigmoid
    return -(1 - ls) * log_sigmoid(beta * h) - ls * log_sigmoid(-beta * h)


def compute_with(
    pair_loss: Callable[[Tensor], Tensor],
    inputs: LossInputs,
    config: Options,
    aggregate: Aggregator,
    name: str,
) -> LossOutput:
    """The mean over rows of the loss of each row's pair, a function of h.

    With two rows per prompt that is the mean over pairs; rows that are neither count as 0.

    Raises:
        ConfigError: no reference log-probs, and not reference-free.
        InfraError: a chosen row without its rejected one.
    """
    ragged = inputs.ragged
    sign = ragged.row_sum(inputs.advantages).sign()
    g = ragged.groups
    paired = ragged.group_sum((sign > 0).long()), ragged.group_sum((sign < 0).long())
    torn = (paired[0] != paired[1]).nonzero()
    if len(torn):
        raise InfraError(f"loss {name}: group {int(torn[0])} is split, a pair must stay together")
    margin = margins(inputs, config, sign, name)
    loss = torch.where(sign != 0, pair_loss(margin)[g], 0.0)
    with torch.no_grad():
        pairs = margin[paired[0] > 0]
        right = (pairs > 0).float().mean() if len(pairs) else torch.zeros(())
        mean = pairs.mean() if len(pairs) else torch.zeros(())
    return LossOutput(
        loss=aggregate.over_rows(loss, ragged),
        metrics={"actor/dpo_margin": mean.detach(), "actor/dpo_accuracy": right},
    )


def margins(inputs: LossInputs, config: Options, sign: Tensor, name: str) -> Tensor:
    """H [G]; 0 for a group without a pair."""
    ratio = inputs.logprobs
    if not config.dpo_reference_free:
        ratio = ratio - need(
            inputs.ref_logprobs, "ref_logprobs", f"actor.policy_loss.loss_mode {name}"
        )
    return inputs.ragged.group_sum(inputs.ragged.row_sum(ratio) * sign)
