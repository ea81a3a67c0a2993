"""What the two DPPO losses share: a truncated ratio as a constant, and tokens masked by divergence.

Qi et al. 2026, https://arxiv.org/abs/2602.04879:

    l = -A · sg(min(ρ, c)) · log π_θ · valid

valid drops a token whose policy has moved further than ε in the direction that A pushes it. The divergence is
that of the two-outcome distribution (this token, any other), so a rare token may change its ratio a lot and a
frequent one may not.
"""

from __future__ import annotations

from torch import Tensor

from meshrl.trainer.algorithms.aggregation import Aggregator
from meshrl.trainer.algorithms.losses._types import (
    LossInputs,
    LossOutput,
    log_ratio,
    mean_metrics,
    weighted,
)
from meshrl.trainer.config import ActorConfig

CLIP_RATIO_C = 20.0
"""The paper's truncation of ρ (section 5.4); a small one biases."""


def compute_with(
    valid: Tensor, inputs: LossInputs, config: ActorConfig, aggregate: Aggregator
) -> LossOutput:
    """The loss with the tokens `valid` bool[N]."""
    c = CLIP_RATIO_C if config.clip_ratio_c is None else config.clip_ratio_c
    d = log_ratio(inputs)
    rho = d.detach().exp()
    loss = -inputs.advantages * rho.clamp(max=c) * inputs.logprobs * valid
    return LossOutput(
        loss=aggregate(weighted(loss, inputs.rollout_is_weights), inputs.ragged),
        metrics=mean_metrics(
            inputs.ragged, pg_clipfrac=~valid, ppo_kl=-d, pg_clipfrac_lower=(rho > c) & valid
        ),
    )
