"""The memory of a run of rows that its stages could not finish. In RAM: a queue that starts anew counts anew.

A fault is lasting if another try would fail again, as far as the worker can tell: a function raises, or returns no
score. Where rows die of such faults and nothing else comes, a wait for a batch ends, after a number of rows and not
after a time, so in moments.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

from meshrl.contract.types import Uid

FEWEST_DEAD = 16
"""Rows that die alike, their stage finishing none in between: no row will ever be finished."""
BATCHES_DEAD = 2
"""Batches of rows that die of lasting faults before one batch is made: too few rows will be finished. Of faults that
may pass one is enough, where it dies while a trainer waits for longer than one call does."""
KIND = re.compile(r"[^:(\[{<'\"0-9]*")
"""The beginning of a reason, up to whatever may be of the row itself: the same for rows that die alike."""
MOST_KINDS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class LastFailure:
    """The last row that a stage's workers could not finish."""

    count: int
    first: float
    last: float
    """Times of the first and the last failure, on the run's clock."""
    uid: Uid
    """The row that failed last."""
    reason: str


@dataclass(frozen=True, slots=True)
class LastingFault:
    """The fault that the last try of a row met, at one stage."""

    reason: str
    finished: int
    """Rows that the stage had finished when this row failed first."""
    again: bool = False
    """The try before met the same."""


class LastingFaults:
    """Counts the rows of a run that died of lasting faults."""

    def __init__(self) -> None:
        self.finished: Counter[str] = Counter()
        """Rows that were written, by stage."""
        self.dead = 0
        """Rows that died so since a batch was taken."""
        self._alike: dict[tuple[str, str], tuple[int, int]] = {}
        """Successive deaths, and rows that the stage had finished by then, by stage and kind of reason."""

    def met(self, stage: str, before: LastingFault | None, reason: str) -> LastingFault:
        """The fault of a row of which the last try had met `before`."""
        if before is None:
            return LastingFault(reason, self.finished[stage])
        return LastingFault(reason, before.finished, again=before.reason == reason)

    def died(self, stage: str, fault: LastingFault) -> None:
        """Count a row that died of a fault; it is one in a row if its stage has finished none since it failed first.

        Rows that fail meet each other when they are tried again, so those finished before say nothing.
        """
        self.dead += 1
        finished = self.finished[stage]
        if fault.finished != finished:
            return
        kind = KIND.match(fault.reason)
        assert kind is not None  # it matches the empty text
        if len(self._alike) >= MOST_KINDS:
            self._alike.clear()
        count, before = self._alike.get((stage, kind.group()), (0, finished))
        count = count + 1 if before == finished else 1
        self._alike[stage, kind.group()] = count, finished

    def in_a_row(self) -> int:
        """The most rows that died alike, their stage having finished none since the first of them failed."""
        counts = [
            count
            for (stage, _), (count, finished) in self._alike.items()
            if finished == self.finished[stage]
        ]
        return max(counts, default=0)

    def forget(self) -> None:
        """Count from here on: a restart may have mended the cause."""
        self.dead = 0
        self._alike.clear()
