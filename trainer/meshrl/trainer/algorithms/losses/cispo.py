"""CISPO: clip the importance weight, never the token.

MiniMax 2025, https://arxiv.org/abs/2506.13585, eqs. 4-5:

    l = -sg(clip(ρ, 1 - ε_low, 1 + ε_high)) · A · log π_θ

Every token keeps a gradient. The paper clips from above only: set `clip_ratio_low` to 1 or more.
"""

from __future__ import annotations

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

DEFAULTS = {
    "algorithm": {
        "adv_estimator": "grpo",
        "filter_groups": {"enable": True, "metric": "reward"},
        "overlong_buffer": {"enable": True},
    },
    "actor": {
        "clip_ratio_low": 1.0,
        "clip_ratio_high": 4.0,
        "loss_agg_mode": "token-mean",
        "policy_loss": {"loss_mode": "cispo"},
    },
    "rollout": {"n": 16},
}
"""MiniMax-M1, eqs. 4-5: only the upper bound works (a lower bound of 1 is none), token-level loss, no KL, and DAPO's
dynamic sampling and length penalty. The upper bound 5 is the one that reproductions use; the paper gives none."""


def compute(inputs: LossInputs, config: ActorConfig, aggregate: Aggregator) -> LossOutput:
    """Policy loss with clipped weights."""
    eps_low, eps_high = clip_range(config)
    d = log_ratio(inputs)
    rho = d.detach().exp()
    rho_clipped = rho.clamp(1 - eps_low, 1 + eps_high)
    loss = -rho_clipped * inputs.advantages * inputs.logprobs
    never = torch.zeros_like(rho)
    return LossOutput(
        loss=aggregate(weighted(loss, inputs.rollout_is_weights), inputs.ragged),
        metrics=mean_metrics(
            inputs.ragged, pg_clipfrac=rho != rho_clipped, ppo_kl=-d, pg_clipfrac_lower=never
        ),
    )
