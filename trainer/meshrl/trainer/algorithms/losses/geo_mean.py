"""GMPO: the geometric mean of a row's token ratios, clipped token by token in log space.

Zhao et al. 2025, https://arxiv.org/abs/2507.20673. With sgn the sign of A_t:

    k_t  = sgn · min(sgn d_t, sgn clip(d_t, -ε_low, ε_high))        d = log π_θ - log π_old
    l_i  = -mean_t(A) · exp(mean_t(k))                               one value per row

The mean over rows leaves out rows without trained tokens and is the same for every split of the batch; under verl's
conventions it is the plain mean over the micro-batch's rows, empty ones included, and the log-ratio is not clamped.
`loss_agg_mode` is not read.
ε_low and ε_high bound the log-ratio; the paper uses 0.4.
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
)

OF_ROWS = True
NAME = "gmpo"
DEFAULTS = {
    "algorithm": {"adv_estimator": "grpo"},
    "actor": {
        "clip_ratio_low": 0.4,
        "clip_ratio_high": 0.4,
        "policy_loss": {"loss_mode": "geo_mean"},
    },
    "rollout": {"n": 8},
}
"""Eq. 4 and section 4: the range is (e^-0.4, e^0.4)."""


def compute(inputs: LossInputs, config: ActorConfig, aggregate: Aggregator) -> LossOutput:
    """Policy loss of whole rows; importance weights enter as their geometric mean over the row."""
    ragged, A = inputs.ragged, inputs.advantages
    eps_low, eps_high = clip_range(config)
    verl = config.conventions == "verl"
    d = log_ratio(inputs, clamp=not verl)
    d_clipped = d.clamp(-eps_low, eps_high)
    sgn = A.sign()
    k = sgn * torch.minimum(sgn * d, sgn * d_clipped)
    loss = -ragged.row_mean(A) * ragged.row_mean(k).exp()
    if inputs.rollout_is_weights is not None:
        loss = loss * ragged.row_mean((inputs.rollout_is_weights + 1e-10).log()).exp()

    clipped = d != d_clipped
    return LossOutput(
        loss=loss.mean() if verl else aggregate.over_rows(loss, ragged),
        metrics=mean_metrics(
            ragged,
            pg_clipfrac=clipped & (A > 0),
            ppo_kl=-d,
            pg_clipfrac_lower=clipped & (A < 0),
        ),
    )
