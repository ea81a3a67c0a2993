"""What the preference losses share: the log-ratio margin of the chosen over the rejected row of each group.

Rafailov et al. 2023, https://arxiv.org/abs/2305.18290, eq. 7:

    h = (log π_θ(y_c) - log π_θ(y_r)) - (log π_ref(y_c) - log π_ref(y_r))      sums over the trained tokens

The sign of a row's advantage says whether it is chosen (+), rejected (-) or neither (0): see
advantages/preference. A pair must meet in one micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from meshrl.contract.errors import InfraError
from meshrl.trainer.algorithms.aggregation import Aggregator
from meshrl.trainer.algorithms.losses._options.dpo import Options
from meshrl.trainer.algorithms.losses._types import LossInputs, LossOutput, need


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
        ratio = ratio - need(inputs.ref_logprobs, "ref_logprobs", name)
    return inputs.ragged.group_sum(inputs.ragged.row_sum(ratio) * sign)
