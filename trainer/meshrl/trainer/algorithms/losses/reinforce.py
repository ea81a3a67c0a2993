"""REINFORCE with importance weights.

Williams 1992, https://doi.org/10.1007/BF00992696; the weights w are those of `rollout_correction`:

    l = -A log π_θ · w
"""

from __future__ import annotations

from meshrl.trainer.algorithms.aggregation import Aggregator
from meshrl.trainer.algorithms.losses._types import (
    ActorConfig,
    LossInputs,
    LossOutput,
    log_ratio,
    mean_metrics,
    weighted,
)


def compute(inputs: LossInputs, config: ActorConfig, aggregate: Aggregator) -> LossOutput:
    """Policy loss; nothing in `config` is read."""
    loss = -inputs.advantages * inputs.logprobs
    d = log_ratio(inputs, clamp=False)
    return LossOutput(
        loss=aggregate(weighted(loss, inputs.rollout_is_weights), inputs.ragged),
        metrics=mean_metrics(inputs.ragged, ppo_kl=-d),
    )
