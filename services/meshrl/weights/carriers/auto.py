"""Chooses a carrier for each class of receivers: by what both ends can do, and by what was measured.

A class is all replicas that the same carriers reach: those on this host, those elsewhere. The seconds of a version
are predicted as work x seconds per byte of work. Work is the version's bytes; for a carrier that sends only changes,
it is a share of them that follows the density. Before it is measured, a carrier has the rate that its module states,
scaled by the ratio of measured to stated rate of the others. A carrier of changes that has no base sends everything;
routes.py measures it under a second name then, so that its first version does not count against the later ones.

    choose    the least predicted seconds; sometimes another carrier, so that a change of the network is noticed.
              These trials never cost more than 5 % of all seconds spent, by their predictions.
    failed    a carrier that fails twice in a row in one class, or once in a trial, is not used there for 64 versions,
              then twice as long, and so on.

This module is no carrier: with `weights.carrier: auto`, routes.py asks the `CostModel` for each version.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

EXPLORE_SHARE = 0.05
EXPLORE_EVERY = 32
_NEWEST = 0.3
"""Weight of the newest measurement."""
_MOST_FAILURES = 2
_EXCLUDED_VERSIONS = 64


@dataclass(slots=True)
class _Record:
    """One carrier in one class."""

    rate: float
    """Bytes/s, as its module states."""
    seconds_per_byte: float | None = None
    used: int = 0
    """The turn of its last use."""
    failures: int = 0
    exclusions: int = 0
    excluded_until: int = 0


@dataclass(slots=True)
class _Class:
    """Receivers that the same carriers reach."""

    records: dict[str, _Record] = field(default_factory=dict)
    turn: int = 0
    spent_s: float = 0.0
    explored_s: float = 0.0
    """Part of `spent_s`: what trials took beyond the prediction of the best carrier."""
    trial: tuple[str, float] | None = None
    """The carrier on trial now, and the predicted seconds of the best one."""

    def predicted_s(self, name: str, work: float) -> float:
        record = self.records[name]
        if record.seconds_per_byte is not None:
            return work * record.seconds_per_byte
        measured = [
            r.seconds_per_byte * r.rate
            for r in self.records.values()
            if r.seconds_per_byte is not None
        ]
        slower = sorted(measured)[len(measured) // 2] if measured else 1.0
        return work / record.rate * slower


class CostModel:
    """The cost model. Belongs to one event loop; never waits."""

    def __init__(self) -> None:
        self._classes: dict[str, _Class] = {}

    def choose(self, receivers: str, work: Mapping[str, float], rates: Mapping[str, float]) -> str:
        """The carrier of the next version for a class.

        Args:
            receivers: the class.
            work: bytes of work by carrier; at least one.
            rates: bytes/s by carrier before anything is measured.
        """
        group = self._classes.setdefault(receivers, _Class())
        group.turn += 1
        for name in work:
            group.records.setdefault(name, _Record(rates[name]))
        open_routes = [name for name in work if group.records[name].excluded_until < group.turn]
        if not open_routes:
            return min(work, key=lambda name: group.records[name].excluded_until)
        best = min(open_routes, key=lambda name: group.predicted_s(name, work[name]))
        best_s = group.predicted_s(best, work[best])
        trial = self._trial(group, best_s, {n: work[n] for n in open_routes if n != best})
        group.trial = (trial, best_s) if trial else None
        chosen = trial or best
        group.records[chosen].used = group.turn
        return chosen

    def observe(
        self, receivers: str, name: str, work: float, seconds: float, opening_s: float = 0.0
    ) -> None:
        """A version has arrived at a replica of the class; `opening_s` (to open the channel) is not counted."""
        group = self._classes[receivers]
        record = group.records[name]
        record.failures = record.exclusions = 0
        fresh = seconds / max(work, 1.0)
        known = record.seconds_per_byte
        record.seconds_per_byte = fresh if known is None else known + _NEWEST * (fresh - known)
        group.spent_s += seconds + opening_s
        if group.trial is not None and group.trial[0] == name:
            group.explored_s += max(0.0, seconds + opening_s - group.trial[1])

    def failed(self, receivers: str, name: str) -> None:
        """A version has not arrived, and the carrier may be the cause."""
        group = self._classes[receivers]
        record = group.records[name]
        # A failed trial has cost the fleet a deadline: one failure is enough.
        record.failures += _MOST_FAILURES if group.trial and group.trial[0] == name else 1
        if record.failures >= _MOST_FAILURES:
            record.failures = 0
            record.excluded_until = group.turn + (_EXCLUDED_VERSIONS << record.exclusions)
            record.exclusions += 1

    @staticmethod
    def _trial(group: _Class, best_s: float, others: Mapping[str, float]) -> str | None:
        """The carrier that was unused for longest, if it is due for a trial and within the 5 %."""
        due = [name for name in others if group.turn - group.records[name].used >= EXPLORE_EVERY]
        if not due:
            return None
        name = min(due, key=lambda each: group.records[each].used)
        extra_s = group.predicted_s(name, others[name]) - best_s
        return name if extra_s <= EXPLORE_SHARE * group.spent_s - group.explored_s else None
