"""Clip-Cov: no gradient for a random few of the tokens that drive the entropy down.

Cui et al. 2025, "The Entropy Mechanism", https://arxiv.org/abs/2505.22617:

    Cov_t = (A_t - mean A) (log π_t - mean log π)         means over the trained tokens given
    l = max(-A ρ, -A clip(ρ)) · [t not chosen]

Chosen are at most max(1, r · tokens) random tokens with lb < Cov < ub that the clip leaves alone. No dual
clip. The choice is made within a micro-batch and drawn from torch's CPU generator.
"""

from __future__ import annotations

from meshrl.common.config import Config
from meshrl.trainer.algorithms.aggregation import Aggregator
from meshrl.trainer.algorithms.lazy_torch import Tensor, torch
from meshrl.trainer.algorithms.losses._types import (
    ActorConfig,
    LossInputs,
    LossOutput,
    clip_range,
    log_ratio,
    mean_metrics,
    weighted,
)
from meshrl.trainer.algorithms.options import options
from meshrl.trainer.algorithms.ragged import Ragged


class Options(Config):
    """Keys of `actor.policy_loss`."""

    clip_cov_ratio: float = 2e-4
    """Share of the tokens that get no gradient."""
    clip_cov_lb: float = 1.0
    """Lower bound of the covariance of these tokens."""
    clip_cov_ub: float = 5.0
    """Upper bound of the covariance of these tokens."""


def compute(inputs: LossInputs, config: ActorConfig, aggregate: Aggregator) -> LossOutput:
    """Clipped policy loss without the chosen tokens."""
    ragged, A = inputs.ragged, inputs.advantages
    eps_low, eps_high = clip_range(config)
    d = log_ratio(inputs)
    rho = d.exp()
    plain = -A * rho
    clipped = -A * rho.clamp(1 - eps_low, 1 + eps_high)

    p = options(config.policy_loss, Options)
    with torch.no_grad():
        cov = covariance(ragged, A, inputs.logprobs)
        left_alone = ragged.mask & ~(clipped > plain)
        candidates = left_alone & (cov > p.clip_cov_lb) & (cov < p.clip_cov_ub)
        chosen = choose(candidates, max(1, int(p.clip_cov_ratio * int(ragged.num_valid))))
    loss = torch.maximum(plain, clipped) * ~chosen
    return LossOutput(
        loss=aggregate(weighted(loss, inputs.rollout_is_weights), ragged),
        metrics=mean_metrics(ragged, pg_clipfrac=chosen, ppo_kl=-d),
    )


def covariance(ragged: Ragged, A: Tensor, logprobs: Tensor) -> Tensor:
    """Cov [N] of advantages and log-probs [N]."""
    return (A - ragged.token_mean(A)) * (logprobs - ragged.token_mean(logprobs))


def choose(candidates: Tensor, count: int) -> Tensor:
    """bool[N]: `count` random ones of the `candidates` bool[N], or all if they are fewer."""
    places = candidates.nonzero().squeeze(1)
    chosen = torch.zeros_like(candidates)
    if len(places):
        chosen[places[torch.randperm(len(places))[:count].to(places.device)]] = True
    return chosen
