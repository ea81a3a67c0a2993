"""The bounds of a rollout correction as a recipe writes them. Imports no torch: a recipe is checked at once."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from meshrl.contract.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

STATISTICS = (
    "token_k1",
    "token_k2",
    "token_k3",
    "seq_sum_k1",
    "seq_sum_k2",
    "seq_sum_k3",
    "seq_mean_k1",
    "seq_mean_k2",
    "seq_mean_k3",
    "seq_max_k2",
    "seq_max_k3",
)


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


def parse_threshold(threshold: float | str) -> tuple[float | None, float]:
    """(lower, upper) of `rollout_is_threshold`; without a lower bound it means TIS.

    Raises:
        ConfigError: not a positive number or "lo_hi" with lo <= hi.
    """
    low_text, bar, high_text = str(threshold).strip().rpartition("_")
    try:
        high = float(high_text)
        low = float(low_text) if bar else None
    except ValueError as error:
        raise ConfigError(
            f'rollout_is_threshold {threshold!r}: wanted a number (TIS) or "lo_hi" (IcePop)'
        ) from error
    if high <= 0 or (low is not None and not 0 < low <= high):
        raise ConfigError(f"rollout_is_threshold {threshold!r}: wanted 0 < lo <= hi")
    return low, high
