"""Bypass mode: the policy that sampled is the old policy, and each micro-batch corrects for itself.

With π_old := π_rollout, x = log π_θ - log π_rollout decides on importance weights and rejection
(`rollout_correction`), without gradient:

    ppo_clip    the clipped loss on what was not rejected, without weights: its ratio is the weight already
    reinforce   -A log π_θ · w on what was not rejected

Settings: `policy_loss.rollout_correction`. Batch normalisation of weights is over the micro-batch.
"""

from __future__ import annotations

import dataclasses

from meshrl.trainer.algorithms.aggregation import Aggregator
from meshrl.trainer.algorithms.lazy_torch import torch
from meshrl.trainer.algorithms.losses import reinforce, vanilla
from meshrl.trainer.algorithms.losses._types import ActorConfig, LossInputs, LossOutput
from meshrl.trainer.algorithms.rollout_correction import correct


def compute(inputs: LossInputs, config: ActorConfig, aggregate: Aggregator) -> LossOutput:
    """Policy loss; `inputs.old_logprobs` are the rollout's, `inputs.rollout_is_weights` is not read.

    Raises:
        ConfigError: a threshold that does not fit.
    """
    settings = config.policy_loss.rollout_correction
    correction = correct(inputs.ragged, inputs.logprobs.detach(), inputs.old_logprobs, settings)
    reinforced = settings.loss_type == "reinforce"
    corrected = dataclasses.replace(
        inputs,
        ragged=inputs.ragged.with_mask(correction.mask),
        rollout_is_weights=correction.weights if reinforced else None,
    )
    output = (reinforce if reinforced else vanilla).compute(corrected, config, aggregate)
    metrics = {name: torch.tensor(value) for name, value in correction.metrics.items()}
    return LossOutput(loss=output.loss, metrics={**output.metrics, **metrics})
