"""The critic's clipped squared error.

Schulman et al. 2016-2017; the clip is the one of OpenAI's PPO:

    V_clip = clip(V_φ, V_old - c, V_old + c)
    l = ½ max((V_φ - R)², (V_clip - R)²)

R are the returns of the estimator (not whitened), V_old the values that the advantages were computed with.
"""

from __future__ import annotations

import torch
from torch import Tensor

from meshrl.trainer.algorithms.aggregation import Aggregator
from meshrl.trainer.algorithms.losses._types import LossOutput
from meshrl.trainer.algorithms.ragged import Ragged


def value_loss(
    ragged: Ragged,
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    *,
    cliprange_value: float,
    aggregate: Aggregator,
) -> LossOutput:
    """Loss of predictions `values` [N], which carry the gradient."""
    c = cliprange_value
    clipped = torch.minimum(torch.maximum(values, old_values - c), old_values + c)
    plain_error, clipped_error = (values - returns).square(), (clipped - returns).square()
    loss = torch.maximum(plain_error, clipped_error)
    with torch.no_grad():
        clipfrac = ragged.token_mean((clipped_error > plain_error).float())
        error = ragged.token_mean(plain_error)
        mean = ragged.token_mean(values)
    return LossOutput(
        loss=0.5 * aggregate(loss, ragged),
        metrics={
            "critic/vf_clipfrac": clipfrac,
            "critic/squared_error": error,
            "critic/vpred_mean": mean,
        },
    )
