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

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from meshrl.contract.errors import ConfigError
from meshrl.trainer.algorithms.ragged import Ragged

STATISTICS = (
    *("token_k1", "token_k2", "token_k3"),
    *("seq_sum_k1", "seq_sum_k2", "seq_sum_k3"),
    *("seq_mean_k1", "seq_mean_k2", "seq_mean_k3"),
    *("seq_max_k2", "seq_max_k3"),
)
LOG_RATIO_BOUND = 20.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Criterion:
    """One statistic and the interval that it must lie in."""

    name: str
    lower: float | None
    """log lo of a k1 statistic; None elsewhere."""
    upper: float
    """log hi of a k1 statistic, the threshold elsewhere."""

    @property
    def per_token(self) -> bool:
        """Whether it drops tokens instead of rows."""
        return self.name.startswith("token")

    def keeps(self, statistic: Tensor) -> Tensor:
        """Bool of the statistic's shape."""
        keep = statistic <= self.upper
        return keep if self.lower is None else keep & (statistic >= self.lower)


def parse(rollout_rs: str, threshold: float | str | None) -> tuple[Criterion, ...]:
    """`algorithm.rollout_correction.rollout_rs` and its threshold: one shared, or one per statistic.

    Raises:
        ConfigError: an unknown statistic, a missing, malformed or surplus threshold.
    """
    names = tuple(dict.fromkeys(part.strip() for part in rollout_rs.split(",") if part.strip()))
    unknown = [name for name in names if name not in STATISTICS]
    if unknown or not names:
        raise ConfigError(
            f"rollout_rs {rollout_rs!r}: {unknown[0] if unknown else 'nothing'} is no statistic "
            f"(known: {', '.join(STATISTICS)})"
        )
    if threshold is None:
        raise ConfigError(f"rollout_rs {rollout_rs!r} needs rollout_rs_threshold")
    texts = [part.strip() for part in str(threshold).split(",") if part.strip()]
    if len(texts) == 1:
        texts *= len(names)
    if len(texts) != len(names):
        raise ConfigError(
            f"rollout_rs_threshold {threshold!r} has {len(texts)} values for {len(names)} "
            f"statistics ({', '.join(names)}); give one, or one each"
        )
    return tuple(_criterion(name, text) for name, text in zip(names, texts, strict=True))


def _criterion(name: str, text: str) -> Criterion:
    low_text, bar, high_text = text.rpartition("_")
    try:
        high = float(high_text)
        low = float(low_text) if bar else None
    except ValueError as error:
        raise ConfigError(f"rollout_rs_threshold {text!r} for {name} is no number") from error
    if high <= 0 or (low is not None and not 0 < low <= high):
        raise ConfigError(f"rollout_rs_threshold {text!r} for {name}: wanted 0 < lo <= hi")
    if not name.endswith("k1"):
        if low is not None:
            raise ConfigError(f"rollout_rs_threshold {text!r} for {name}: wanted one upper bound")
        return Criterion(name=name, lower=None, upper=high)
    low = 1 / high if low is None else low
    if low > high:
        raise ConfigError(f"rollout_rs_threshold {text!r} for {name}: 1/{text} is above {text}")
    return Criterion(name=name, lower=math.log(low), upper=math.log(high))


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
