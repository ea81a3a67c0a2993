"""M2PO: the unclipped ratio on every token but the few that carry its second moment.

Zheng et al. 2025, https://arxiv.org/abs/2510.01161:

    l = -A ρ M,     M_t in {0, 1} from `second_moment`, so that mean over kept tokens of (log ρ)² ≤ τ

τ is `policy_loss.rollout_correction.second_moment_threshold`, 0.04 without one. Masked tokens stay in the
denominator. The choice is made within a micro-batch.
"""

from __future__ import annotations

from meshrl.trainer.algorithms.aggregation import Aggregator
from meshrl.trainer.algorithms.losses._types import (
    LossInputs,
    LossOutput,
    log_ratio,
    mean_metrics,
    weighted,
)
from meshrl.trainer.algorithms.second_moment import second_moment_mask
from meshrl.trainer.config import ActorConfig

NEEDS: tuple[str, ...] = ()
THRESHOLD = 0.04


def compute(inputs: LossInputs, config: ActorConfig, aggregate: Aggregator) -> LossOutput:
    """Policy loss of the kept tokens."""
    tau = config.policy_loss.rollout_correction.second_moment_threshold or THRESHOLD
    d = log_ratio(inputs)
    M = second_moment_mask(inputs.ragged, d.detach(), tau)
    loss = -inputs.advantages * d.exp() * M
    return LossOutput(
        loss=aggregate(weighted(loss, inputs.rollout_is_weights), inputs.ragged),
        metrics=mean_metrics(inputs.ragged, pg_clipfrac=~M, ppo_kl=-d),
    )
