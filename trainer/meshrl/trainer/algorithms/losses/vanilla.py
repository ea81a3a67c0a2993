"""PPO's clipped objective with dual clip and an asymmetric range.

Schulman et al. 2017, https://arxiv.org/abs/1707.06347, eq. 7; Ye et al. 2020 (dual clip),
https://arxiv.org/abs/1912.09729, eq. 5; Yu et al. 2025 (DAPO, clip-higher), https://arxiv.org/abs/2503.14476, eq. 8:

    ρ  = exp(log π_θ - log π_old)
    L₁ = max(-A ρ, -A clip(ρ, 1 - ε_low, 1 + ε_high))
    l  = min(L₁, -A c)  if A < 0  else  L₁
"""

from __future__ import annotations

from meshrl.contract.errors import ConfigError
from meshrl.trainer.algorithms.aggregation import Aggregator
from meshrl.trainer.algorithms.lazy_torch import torch
from meshrl.trainer.algorithms.losses._types import (
    ActorConfig,
    LossInputs,
    LossOutput,
    clip_range,
    log_ratio,
    mean_metrics,
    weighted,
)

CLIP_RATIO_C = 3.0


def compute(inputs: LossInputs, config: ActorConfig, aggregate: Aggregator) -> LossOutput:
    """Clipped policy loss.

    Raises:
        ConfigError: `clip_ratio_c` is not above 1.
    """
    c = CLIP_RATIO_C if config.clip_ratio_c is None else config.clip_ratio_c
    if c <= 1:
        raise ConfigError(f"actor.clip_ratio_c is {c}, the dual clip bound must be above 1")
    eps_low, eps_high = clip_range(config)
    A = inputs.advantages
    d = log_ratio(inputs)
    rho = d.exp()

    plain = -A * rho
    clipped = -A * rho.clamp(1 - eps_low, 1 + eps_high)
    upper = torch.maximum(plain, clipped)
    dual = -A * c
    loss = torch.where(A < 0, torch.minimum(upper, dual), upper)

    return LossOutput(
        loss=aggregate(weighted(loss, inputs.rollout_is_weights), inputs.ragged),
        metrics=mean_metrics(
            inputs.ragged,
            pg_clipfrac=clipped > plain,
            ppo_kl=-d,
            pg_clipfrac_lower=(upper > dual) & (A < 0),
        ),
    )
