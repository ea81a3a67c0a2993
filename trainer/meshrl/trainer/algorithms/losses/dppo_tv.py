"""DPPO with total variation: policy optimisation inside a divergence, not inside a ratio.

Qi et al. 2026, https://arxiv.org/abs/2602.04879. With p = π_θ(y_t), q = π_old(y_t):

    l = -A · sg(min(ρ, c)) · log π_θ · valid
    valid = p - q ≤ ε_high  if A > 0  else  p - q ≥ -ε_low

`clip_ratio*` are thresholds on the total variation here, typically 0.15, not on the ratio.
"""

from __future__ import annotations

from meshrl.trainer.algorithms.aggregation import Aggregator
from meshrl.trainer.algorithms.lazy_torch import torch
from meshrl.trainer.algorithms.losses._types import ActorConfig, LossInputs, LossOutput, clip_range
from meshrl.trainer.algorithms.losses.dppo_kl import compute_with


def compute(inputs: LossInputs, config: ActorConfig, aggregate: Aggregator) -> LossOutput:
    """Masked policy loss."""
    eps_low, eps_high = clip_range(config)
    with torch.no_grad():
        tv = inputs.logprobs.exp() - inputs.old_logprobs.exp()
        valid = torch.where(inputs.advantages > 0, tv <= eps_high, tv >= -eps_low)
    return compute_with(valid, inputs, config, aggregate)
