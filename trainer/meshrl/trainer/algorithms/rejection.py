"""Rejection of tokens and rows that the trained policy would hardly have sampled.

With x_t = log π_train - log π_rollout at a sampled token, clamped to ±20, three estimators of the divergence
(http://joschu.net/blog/kl-approx.html) make eleven statistics:

    k1 = -x        k2 = x²/2        k3 = exp(x) - 1 - x
    token_k1/2/3      drops the token
    seq_sum_k1/2/3    drops the row by the sum over its tokens
    seq_mean_k1/2/3   … by the mean (seq_mean_k1 is the geometric mean of the ratios)
    seq_max_k2/3      … by the maximum

k2 and k3 keep what is at most the threshold. A k1 threshold "lo_hi" bounds the ratio and keeps
log lo ≤ k1 ≤ log hi; one number h means (1/h, h). **k1 is -x, so the bounds hold for π_rollout/π_train**, the
inverse of the importance ratio: "0.5_1.2" keeps π_train/π_rollout within [1/1.2, 2].

Several statistics, comma separated, must all be passed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from meshrl.trainer.algorithms.correction_bounds import Criterion
from meshrl.trainer.algorithms.ragged import Ragged

LOG_RATIO_BOUND = 20.0


def statistic(name: str, ragged: Ragged, log_ratio: Tensor) -> Tensor:
    """The statistic `name` of x [N]: [N] for a token statistic, [B] for a row's (0 for empty rows)."""
    level, _, estimator = name.rpartition("_")
    x = log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    k = {"k1": -x, "k2": x.square() / 2, "k3": x.exp() - 1 - x}[estimator]
    match level:
        case "token":
            return k
        case "seq_sum":
            return ragged.row_sum(k)
        case "seq_mean":
            return ragged.row_mean(k)
        case _:
            return ragged.row_max(k)


def reject(
    ragged: Ragged, log_ratio: Tensor, criteria: tuple[Criterion, ...]
) -> tuple[Tensor, dict[str, float]]:
    """The mask bool[N] of what every criterion keeps, and metrics without a prefix."""
    keep = torch.ones_like(ragged.mask)
    metrics: dict[str, float] = {}
    for criterion in criteria:
        values = statistic(criterion.name, ragged, log_ratio)
        tokens = values if criterion.per_token else values[ragged.rows]
        keeps = criterion.keeps(tokens)
        keep = keep & keeps
        prefix = f"rollout_rs_{criterion.name}"
        metrics |= _metrics(prefix, criterion, ragged, values, tokens)
        metrics[f"{prefix}_masked_fraction"] = float(ragged.token_mean((~keeps).float()))
        metrics[f"{prefix}_seq_masked_fraction"] = _share(ragged, _touched(ragged, ~keeps))
    metrics["rollout_rs_masked_fraction"] = float(ragged.token_mean((~keep).float()))
    metrics["rollout_rs_seq_masked_fraction"] = float(_touched(ragged, ~keep).float().mean())
    return ragged.mask & keep, metrics


def _touched(ragged: Ragged, dropped: Tensor) -> Tensor:
    """bool[B]: rows that lose a trained token."""
    return ragged.row_sum(dropped.long()) > 0


def _share(ragged: Ragged, rows: Tensor) -> float:
    """The share of `rows` bool[B] among rows with a trained token."""
    return float(rows[ragged.nonempty].float().mean()) if bool(ragged.nonempty.any()) else 0.0


def _metrics(
    prefix: str, criterion: Criterion, ragged: Ragged, values: Tensor, tokens: Tensor
) -> dict[str, float]:
    lower = 0.0 if criterion.lower is None else criterion.lower
    row_values = ragged.row_mean(values) if criterion.per_token else values
    row_values = row_values[ragged.nonempty]
    own = tokens[ragged.mask] if criterion.per_token else row_values
    clamped = tokens.clamp(lower, criterion.upper)
    variance = ragged.token_mean(clamped.square()) - ragged.token_mean(clamped).square()
    several = int(ragged.num_valid) > 1
    metrics = {
        "mean": ragged.token_mean(tokens),
        "max": own.max(),
        "min": own.min(),
        "fraction_high": (own > criterion.upper).float().mean(),
        "fraction_low": _below(own, criterion),
        "std": variance.clamp(min=0).sqrt() if several else torch.zeros(()),
        "seq_mean": row_values.mean(),
        "seq_std": row_values.std() if len(row_values) > 1 else torch.zeros(()),
        "seq_max": row_values.max(),
        "seq_min": row_values.min(),
        "seq_max_deviation": row_values.abs().max(),
        "seq_fraction_high": (row_values > criterion.upper).float().mean(),
    }
    if criterion.lower is not None:
        metrics["seq_fraction_low"] = _below(row_values, criterion)
    return {f"{prefix}_{name}": float(value) for name, value in metrics.items()}


def _below(values: Tensor, criterion: Criterion) -> Tensor:
    if criterion.lower is None:
        return torch.zeros(())
    return (values < criterion.lower).float().mean()
