"""GPG: the plain policy gradient.

Chu et al. 2025, https://arxiv.org/abs/2504.02546:

    l = -A log π_θ

No ratio and no old log-probs: exact on-policy steps only, or with importance weights.
"""

from __future__ import annotations

from meshrl.trainer.algorithms.aggregation import Aggregator
from meshrl.trainer.algorithms.losses._types import ActorConfig, LossInputs, LossOutput, weighted


def compute(inputs: LossInputs, config: ActorConfig, aggregate: Aggregator) -> LossOutput:
    """Policy loss; nothing in `config` is read."""
    loss = -inputs.logprobs * inputs.advantages
    return LossOutput(loss=aggregate(weighted(loss, inputs.rollout_is_weights), inputs.ragged))
