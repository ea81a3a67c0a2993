"""KL-Cov: a KL penalty on the few tokens that drive the entropy down most.

Cui et al. 2025, "The Entropy Mechanism", https://arxiv.org/abs/2505.22617:

    Cov_t = (A_t - mean A) (log π_t - mean log π)         means over the trained tokens given
    l = -A ρ + [Cov_t among the largest max(1, r · tokens)] · β |log ρ|

No clip. The choice is made within a micro-batch. The penalty's log ρ is not clamped: it pulls back what runs away.
"""

from __future__ import annotations

from meshrl.common.config import Config
from meshrl.trainer.algorithms.aggregation import Aggregator
from meshrl.trainer.algorithms.lazy_torch import torch
from meshrl.trainer.algorithms.losses._types import (
    ActorConfig,
    LossInputs,
    LossOutput,
    log_ratio,
    mean_metrics,
    weighted,
)
from meshrl.trainer.algorithms.options import options


class Options(Config):
    """Keys of `actor.policy_loss`."""

    kl_cov_ratio: float = 2e-4
    """Share of the tokens that are penalised, those of the largest covariance."""
    ppo_kl_coef: float = 0.1
    """Weight of their KL penalty."""


def compute(inputs: LossInputs, config: ActorConfig, aggregate: Aggregator) -> LossOutput:
    """Policy loss with the penalty on the chosen tokens."""
    ragged, A = inputs.ragged, inputs.advantages
    p = options(config.policy_loss, Options)
    d = log_ratio(inputs, clamp=False)
    with torch.no_grad():
        A_valid, log_pi = A[ragged.mask], inputs.logprobs[ragged.mask]
        cov = (A_valid - A_valid.mean()) * (log_pi - log_pi.mean())
        count = min(len(cov), max(1, int(p.kl_cov_ratio * len(cov))))
        chosen = torch.zeros_like(cov).index_fill(0, cov.topk(count).indices, 1.0)
    penalty = p.ppo_kl_coef * d.abs() * ragged.from_valid(chosen)
    loss = -A * log_ratio(inputs).exp() + penalty
    return LossOutput(
        loss=aggregate(weighted(loss, inputs.rollout_is_weights), ragged),
        metrics=mean_metrics(ragged, ppo_kl=d.abs()),
    )
