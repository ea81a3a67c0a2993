"""M2PO: the unclipped ratio on every token but the few that carry its second moment.

Zheng et al. 2025, "Prosperity before Collapse: How Far Can Off-Policy RL Reach with Stale Data on LLMs?",
https://arxiv.org/abs/2510.01161:

    M₂ = mean over tokens of (log π_θ - log π_behaviour)²        a bound on the χ² divergence
    l  = -A ρ M,     M_t in {0, 1} so that the mean over kept tokens of (log ρ)² ≤ τ

Tokens are masked from the largest (log ρ)² down, and the rest is trained unclipped, so informative tokens of stale
rows survive where a clip would silence them. Masked tokens stay in the denominator. The choice is made within a
micro-batch; τ is `policy_loss.rollout_correction.second_moment_threshold`, 0.04 without one.
"""

from __future__ import annotations

from meshrl.trainer.algorithms.aggregation import Aggregator
from meshrl.trainer.algorithms.lazy_torch import Tensor, torch
from meshrl.trainer.algorithms.losses._types import (
    ActorConfig,
    LossInputs,
    LossOutput,
    log_ratio,
    mean_metrics,
    weighted,
)
from meshrl.trainer.algorithms.ragged import Ragged

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


def second_moment_mask(ragged: Ragged, log_ratio: Tensor, threshold: float) -> Tensor:
    """bool[N]: the most trained tokens whose mean squared log-ratio [N] is at most `threshold`.

    Equal squares stay or go in the order of the tokens.
    """
    valid = ragged.mask.nonzero().squeeze(1)
    squares = log_ratio[valid].double().square()
    ascending, order = squares.sort(stable=True)
    counts = torch.arange(1, len(valid) + 1, device=valid.device)
    # The running mean of an ascending sequence never falls, so the kept ones are a prefix.
    keep = ascending.cumsum(0) / counts <= threshold
    mask = torch.zeros_like(ragged.mask)
    mask[valid[order[keep]]] = True
    return mask
