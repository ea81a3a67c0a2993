"""DPPO with the binary KL divergence: policy optimisation inside a divergence, not inside a ratio.

Qi et al. 2026, https://arxiv.org/abs/2602.04879. With p = π_θ(y_t), q = π_old(y_t):

    KL = q (log q - log p) + (1 - q) log((1 - q)/(1 - p))
    l  = -A · sg(min(ρ, c)) · log π_θ · valid
    valid = KL ≤ ε_high or p ≤ q  if A > 0  else  KL ≤ ε_low or p ≥ q

valid drops a token whose policy has moved further than ε in the direction that A pushes it. The divergence is that of
the two-outcome distribution (this token, any other), so a rare token may change its ratio a lot and a frequent one
may not. `clip_ratio*` are thresholds on the KL here, typically 0.05, not on the ratio.
"""

from __future__ import annotations

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

EPSILON = 1e-8
CLIP_RATIO_C = 20.0
"""The paper's truncation of ρ (section 5.4); a small one biases."""


def compute(inputs: LossInputs, config: ActorConfig, aggregate: Aggregator) -> LossOutput:
    """Masked policy loss."""
    eps_low, eps_high = clip_range(config)
    with torch.no_grad():
        log_p, log_q = inputs.logprobs, inputs.old_logprobs
        p, q = log_p.exp(), log_q.exp()
        kl = q * (log_q - log_p) + (1 - q) * torch.log((1 - q + EPSILON) / (1 - p + EPSILON))
        raised = (kl <= eps_high) | (p <= q)
        lowered = (kl <= eps_low) | (p >= q)
        valid = torch.where(inputs.advantages > 0, raised, lowered)
    return compute_with(valid, inputs, config, aggregate)


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
