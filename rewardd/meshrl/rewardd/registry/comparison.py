"""Compares the scores of two versions on the same samples."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from meshrl.contract.types import Sample, Score

TOLERANCE = 1e-6
SHOWN = 5
SHOWN_TEXT = 200
"""Characters of a response, of its end: there the answer is."""


@dataclass(slots=True, kw_only=True)
class Differences:
    """Version `b` against version `a`."""

    a: str
    b: str
    rows: int = 0
    compared: int = 0
    """Rows that both have scored; the sums cover these."""
    equal: int = 0
    """Rows whose scores differ by at most 1e-6."""
    faults_a: int = 0
    faults_b: int = 0
    sum_a: float = 0.0
    sum_b: float = 0.0
    largest: list[tuple[float, str, float, float, str]] = field(default_factory=list)
    """(|difference|, uid, score a, score b, end of the response) of the rows that differ most."""

    def add(self, scored: Iterable[tuple[Sample, Score, Score]]) -> None:
        """Count rows, each with its scores by `a` and by `b`."""
        for sample, one, other in scored:
            self.rows += 1
            self.faults_a += not one.outcome.trainable
            self.faults_b += not other.outcome.trainable
            if not (one.outcome.trainable and other.outcome.trainable):
                continue
            self.compared += 1
            self.sum_a += one.score
            self.sum_b += other.score
            gap = abs(other.score - one.score)
            if gap <= TOLERANCE:
                self.equal += 1
                continue
            text = sample.solution[-SHOWN_TEXT:]
            heapq.heappush(self.largest, (gap, str(one.uid), one.score, other.score, text))
            if len(self.largest) > SHOWN:
                heapq.heappop(self.largest)

    @property
    def mean_a(self) -> float:
        """Over the compared rows; 0 without any."""
        return self.sum_a / self.compared if self.compared else 0.0

    @property
    def mean_b(self) -> float:
        """Over the compared rows; 0 without any."""
        return self.sum_b / self.compared if self.compared else 0.0

    @property
    def largest_first(self) -> Sequence[tuple[float, str, float, float, str]]:
        """The rows that differ most, the largest difference first."""
        return sorted(self.largest, reverse=True)
