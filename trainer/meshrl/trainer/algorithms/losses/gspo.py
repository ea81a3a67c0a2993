"""GSPO: the importance ratio of a whole sequence, length-normalised.

Zheng et al. 2025, https://arxiv.org/abs/2507.18071, eqs. 7, 13-14 (GSPO-token):

    s_i   = exp( 1/L_i Σ_t log π_θ/π_old )
    s_i,t = sg[s_i] · π_θ / sg[π_θ]
    l = max(-A s, -A clip(s, 1 - ε_low, 1 + ε_high))

ε is of the order of 3e-4, because s averages over a row. The paper averages rows: `loss_agg_mode:
seq-mean-token-mean`.
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

LOG_RATIO_MAX = 10.0
DEFAULTS = {
    "algorithm": {"adv_estimator": "grpo"},
    "actor": {
        "clip_ratio_low": 3e-4,
        "clip_ratio_high": 4e-4,
        "loss_agg_mode": "seq-mean-token-mean",
        "policy_loss": {"loss_mode": "gspo"},
    },
    "rollout": {"n": 8},
}
"""Eq. 5 and section 5.1: ε 3e-4 below and 4e-4 above, each response weighs the same, no KL."""


def compute(inputs: LossInputs, config: ActorConfig, aggregate: Aggregator) -> LossOutput:
    """Clipped policy loss with sequence ratios."""
    ragged, A = inputs.ragged, inputs.advantages
    eps_low, eps_high = clip_range(config)
    d = log_ratio(inputs, clamp=False)
    log_s_row = ragged.row_sum(d.detach()) / ragged.valid_lengths.clamp(min=1)
    log_s = inputs.logprobs - inputs.logprobs.detach() + log_s_row[ragged.rows]
    s = log_s.clamp(max=LOG_RATIO_MAX).exp()

    plain = -A * s
    clipped = -A * s.clamp(1 - eps_low, 1 + eps_high)
    loss = torch.maximum(plain, clipped)
    never = torch.zeros_like(plain)
    return LossOutput(
        loss=aggregate(weighted(loss, inputs.rollout_is_weights), ragged),
        metrics=mean_metrics(
            ragged, pg_clipfrac=clipped > plain, ppo_kl=-d, pg_clipfrac_lower=never
        ),
    )
