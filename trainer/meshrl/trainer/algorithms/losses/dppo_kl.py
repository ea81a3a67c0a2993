"""DPPO with the binary KL divergence: policy optimisation inside a divergence, not inside a ratio.

Qi et al. 2026, https://arxiv.org/abs/2602.04879. With p = π_θ(y_t), q = π_old(y_t):

    KL = q (log q - log p) + (1 - q) log((1 - q)/(1 - p))
    l  = -A · sg(min(ρ, c)) · log π_θ · valid
    valid = KL ≤ ε_high or p ≤ q  if A > 0  else  KL ≤ ε_low or p ≥ q

`clip_ratio*` are thresholds on the KL here, typically 0.05, not on the ratio.
"""

from __future__ import annotations

import torch

from meshrl.trainer.algorithms.aggregation import Aggregator
from meshrl.trainer.algorithms.losses._dppo import compute_with
from meshrl.trainer.algorithms.losses._types import LossInputs, LossOutput, clip_range
from meshrl.trainer.config import ActorConfig

NEEDS: tuple[str, ...] = ()
EPSILON = 1e-8


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
