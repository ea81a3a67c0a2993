"""Corrections for training on tokens that another policy sampled: importance weights and rejection.

Three policies (decoupled PPO, Hilton et al. 2021, https://arxiv.org/abs/2110.00641): π_rollout sampled, π_old is the
trainer's before the step, π_θ is being trained. The loss clips π_θ/π_old; this file corrects π_old/π_rollout:

    x = log π_old - log π_rollout
    token     w_t = exp(clamp(x_t, ±20))
    sequence  w   = exp(clamp(Σ_t x_t, ±20))      at every token of the row, not normalised by length

A threshold "2.0" clamps from above: truncated importance sampling (TIS; Ionides 2008; Yao et al. 2025,
https://fengyao.notion.site/off-policy-rl). A threshold "lo_hi" zeroes what is outside (IcePop; Ling Team 2025,
https://arxiv.org/abs/2510.18855); the mask stays. Rejection changes the mask: see `rejection`, `second_moment`.

In bypass mode π_old is π_rollout and x = log π_θ - log π_rollout: see losses/bypass_mode.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from meshrl.trainer.algorithms.correction_bounds import parse, parse_threshold
from meshrl.trainer.algorithms.mismatch import mismatch_metrics
from meshrl.trainer.algorithms.ragged import Ragged
from meshrl.trainer.algorithms.rejection import reject
from meshrl.trainer.algorithms.second_moment import second_moment_mask
from meshrl.trainer.config import RolloutCorrectionConfig

LOG_RATIO_BOUND = 20.0
SMALLEST_MEAN = 1e-8
"""Weights whose mean is not above this are not normalised."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Correction:
    """What `correct` returns."""

    weights: Tensor | None
    """float32[N], detached, 0 at masked tokens; None when `rollout_is` is off."""
    mask: Tensor
    """bool[N]: trained tokens that no criterion rejects."""
    metrics: dict[str, float]
    """Prefix `rollout_corr/`."""


@torch.no_grad()
def correct(
    ragged: Ragged,
    train_logprobs: Tensor,
    rollout_logprobs: Tensor,
    config: RolloutCorrectionConfig,
) -> Correction:
    """Weights and mask for one batch; log-probs float32[N].

    Weights are computed on the rows as given: rejection does not change them.

    Raises:
        ConfigError: a threshold that does not fit.
    """
    if not bool(ragged.mask.any()):
        weights = None if config.rollout_is is None else torch.zeros_like(train_logprobs)
        return Correction(weights=weights, mask=ragged.mask, metrics={})
    x = train_logprobs - rollout_logprobs
    weights, mask = None, ragged.mask
    metrics: dict[str, float] = {}
    if config.rollout_is is not None:
        weights, metrics = importance_weights(
            ragged,
            x,
            level=config.rollout_is,
            threshold=config.rollout_is_threshold,
            batch_normalize=config.rollout_is_batch_normalize,
        )
    if config.rollout_rs is not None:
        criteria = parse(config.rollout_rs, config.rollout_rs_threshold)
        mask, rejected = reject(ragged, x, criteria)
        metrics |= rejected
    if config.second_moment_threshold is not None:
        keep = second_moment_mask(ragged.with_mask(mask), x, config.second_moment_threshold)
        metrics["second_moment_masked_fraction"] = float((mask & ~keep).sum() / ragged.num_valid)
        mask = keep
    metrics |= mismatch_metrics(ragged, train_logprobs, rollout_logprobs)
    prefixed = {f"rollout_corr/{name}": value for name, value in metrics.items()}
    return Correction(weights=weights, mask=mask, metrics=prefixed)


def importance_weights(
    ragged: Ragged,
    log_ratio: Tensor,
    *,
    level: Literal["token", "sequence"],
    threshold: float | str = 2.0,
    batch_normalize: bool = False,
) -> tuple[Tensor, dict[str, float]]:
    """Weights [N] from x [N], 0 at masked tokens, and metrics without a prefix.

    `batch_normalize` divides by the mean over trained tokens (token) or over non-empty rows (sequence).
    """
    lower, upper = parse_threshold(threshold)
    row_x = ragged.row_sum(log_ratio)
    x = log_ratio if level == "token" else row_x[ragged.rows]
    raw = x.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp() * ragged.mask
    inside = raw <= upper if lower is None else (raw >= lower) & (raw <= upper)
    weights = torch.where(inside, raw, upper if lower is None else 0.0)

    metrics = _metrics(ragged, weights, raw, lower, upper)
    if level == "sequence":
        log_low = math.log(1 / upper if lower is None else lower)
        metrics |= {
            "rollout_is_max": float(row_x.max().clamp(max=LOG_RATIO_BOUND).exp()),
            "rollout_is_min": float(row_x.min().exp()),
            "rollout_is_ratio_fraction_high": float((row_x > math.log(upper)).float().mean()),
            "rollout_is_ratio_fraction_low": float((row_x < log_low).float().mean()),
        }
    if lower is not None:
        outside = (raw < lower) | (raw > upper)
        metrics["rollout_is_oob_ratio"] = float(ragged.token_mean(outside.float()))

    weights = weights.detach()
    if batch_normalize:
        mean = ragged.token_mean(weights)
        if level == "sequence":
            mean = ragged.row_mean(weights)[ragged.nonempty].mean()
        factor = float(mean) if float(mean) > SMALLEST_MEAN else 1.0
        weights = weights / factor
        metrics["rollout_is_batch_norm_factor"] = factor
    return weights, metrics


def effective_sample_size(ragged: Ragged, weights: Tensor) -> float:
    """Share of the tokens that the weights [N] leave in effect: (E w)² / E w², 0 when all are 0."""
    normalised = weights / (ragged.token_mean(weights) + 1e-8)
    second = float(ragged.token_mean(normalised.square()))
    return 1 / second if second > 0 else 0.0


def _metrics(
    ragged: Ragged, weights: Tensor, raw: Tensor, lower: float | None, upper: float
) -> dict[str, float]:
    lower = 1 / upper if lower is None else lower
    mask = ragged.mask
    bounded = weights.clamp(0.0, upper)
    variance = ragged.token_mean(bounded.square()) - ragged.token_mean(bounded).square()
    several = int(ragged.num_valid) > 1
    row_weights, row_raw = ragged.row_mean(weights), ragged.row_mean(raw)
    metrics = {
        "mean": ragged.token_mean(weights),
        "max": weights[mask].max(),
        "min": weights[mask].min(),
        "ratio_fraction_high": ragged.token_mean((raw > upper).float()),
        "ratio_fraction_low": ragged.token_mean((raw < lower).float()),
        "std": variance.clamp(min=0).sqrt() if several else torch.zeros(()),
        "seq_mean": row_weights.mean(),
        "seq_std": row_weights.std() if ragged.num_rows > 1 else torch.zeros(()),
        "seq_max": row_weights.max(),
        "seq_min": row_weights.min(),
        "seq_max_deviation": (row_weights - 1).abs().max(),
        "seq_fraction_high": (row_raw > upper).float().mean(),
        "seq_fraction_low": (row_raw < lower).float().mean(),
    }
    named = {f"rollout_is_{name}": float(value) for name, value in metrics.items()}
    named["rollout_is_eff_sample_size"] = effective_sample_size(ragged, bounded)
    return named


def interpolate(rollout_logprobs: Tensor, logprobs: Tensor, staleness: Tensor) -> Tensor:
    """Log π_prox float32[N], detached: the proximal policy of decoupled PPO without a forward pass.

    Recomputing π_prox costs one forward pass of the batch; the log-linear interpolation between the sampling policy
    and the trained one (A-3PO, Li et al. 2025, https://arxiv.org/abs/2512.06547) costs none:

        log π_prox = α log π_rollout + (1 - α) log π_θ,     α = 1/d,  d = versions between the two

    d = 0 or 1 keeps the sampling policy (d = 1 is one-step-off); the staler a token, the closer π_prox is to π_θ.
    `staleness` int64[N] is d of each token.
    """
    alpha = 1 / staleness.clamp(min=1)
    return alpha * rollout_logprobs + (1 - alpha) * logprobs.detach()
