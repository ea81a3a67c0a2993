"""A histogram of durations that is cheap enough for every commit and every row."""

from __future__ import annotations

from bisect import bisect_left
from typing import Final

BOUNDS_S: Final = (0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
"""Upper bounds of the buckets; one more bucket holds longer durations."""


class Durations:
    """Counts durations by bucket."""

    __slots__ = ("counts", "total_s")

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS_S) + 1)
        self.total_s = 0.0

    def add(self, seconds: float, times: int = 1) -> None:
        """Count a duration of `seconds`, `times` times."""
        self.counts[bisect_left(BOUNDS_S, seconds)] += times
        self.total_s += seconds * times

    def cumulative(self) -> list[tuple[float, int]]:
        """For each bound, and infinity: how many durations are not longer."""
        total = 0
        counts: list[tuple[float, int]] = []
        for bound, count in zip((*BOUNDS_S, float("inf")), self.counts, strict=True):
            total += count
            counts.append((bound, total))
        return counts
