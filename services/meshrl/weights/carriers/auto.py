"""Chooses a carrier for each class of receivers: by what both ends can do, and by what was measured.

A class is all replicas that can be reached in the same ways: those on this host, those elsewhere. Seconds of a
version are predicted as work x seconds per byte of work; work is the version's bytes, and for a carrier that sends
only what changed a part of them that follows the density. Before it is measured a carrier counts with the rate that
its module states, scaled by how the measured ones do against theirs. A carrier of changes that has no base sends
everything: it is measured as another one then (ways.py), so that the first version by it costs what it costs, and the
ones after it, which have that for a base, are judged by themselves.

    choose    the least predicted seconds; now and then another one, so that a network that changed is noticed.
              Exploring never costs more than 5 % of all seconds spent, by what is predicted for it.
    failed    twice running in one class, or once when it was only tried: passed over for 64 versions there, then
              twice as long, and so on.

This module is no carrier: `weights.carrier: auto` has the plane ask the `Chooser` for each version.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

EXPLORE_SHARE = 0.05
EXPLORE_EVERY = 32
_NEWEST = 0.3
"""Weight of the newest measurement."""
_STRIKES = 2
_BARRED = 64


@dataclass(slots=True)
class _Record:
    """One carrier in one class."""

    rate: float
    """As its module states, bytes/s."""
    seconds_per_byte: float | None = None
    used: int = 0
    """The turn of its last use."""
    strikes: int = 0
    bars: int = 0
    barred_until: int = 0


@dataclass(slots=True)
class _Class:
    """Receivers that are reached alike."""

    records: dict[str, _Record] = field(default_factory=dict)
    turn: int = 0
    spent_s: float = 0.0
    explored_s: float = 0.0
    """Of it, more than the best one was predicted to take."""
    trial: tuple[str, float] | None = None
    """What is tried now, and what the best one was predicted to take."""

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


class Chooser:
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
        found = self._classes.setdefault(receivers, _Class())
        found.turn += 1
        for name in work:
            found.records.setdefault(name, _Record(rates[name]))
        open_ways = [name for name in work if found.records[name].barred_until < found.turn]
        if not open_ways:
            return min(work, key=lambda name: found.records[name].barred_until)
        best = min(open_ways, key=lambda name: found.predicted_s(name, work[name]))
        best_s = found.predicted_s(best, work[best])
        trial = self._trial(found, best_s, {n: work[n] for n in open_ways if n != best})
        found.trial = (trial, best_s) if trial else None
        chosen = trial or best
        found.records[chosen].used = found.turn
        return chosen

    def observe(
        self, receivers: str, name: str, work: float, seconds: float, opening_s: float = 0.0
    ) -> None:
        """A version has arrived at a replica of the class; `opening_s` of a first meeting is no part of its rate."""
        found = self._classes[receivers]
        record = found.records[name]
        record.strikes = record.bars = 0
        fresh = seconds / max(work, 1.0)
        known = record.seconds_per_byte
        record.seconds_per_byte = fresh if known is None else known + _NEWEST * (fresh - known)
        found.spent_s += seconds + opening_s
        if found.trial is not None and found.trial[0] == name:
            found.explored_s += max(0.0, seconds + opening_s - found.trial[1])

    def failed(self, receivers: str, name: str) -> None:
        """A version has not arrived, and the carrier may be why."""
        found = self._classes[receivers]
        record = found.records[name]
        # A trial that failed has cost the fleet a deadline: it is not repeated to be sure.
        record.strikes += _STRIKES if found.trial and found.trial[0] == name else 1
        if record.strikes >= _STRIKES:
            record.strikes = 0
            record.barred_until = found.turn + (_BARRED << record.bars)
            record.bars += 1

    @staticmethod
    def _trial(found: _Class, best_s: float, others: Mapping[str, float]) -> str | None:
        """The other carrier that was not used for longest, if its turn has come and it can be afforded."""
        due = [name for name in others if found.turn - found.records[name].used >= EXPLORE_EVERY]
        if not due:
            return None
        name = min(due, key=lambda each: found.records[each].used)
        extra_s = found.predicted_s(name, others[name]) - best_s
        return name if extra_s <= EXPLORE_SHARE * found.spent_s - found.explored_s else None
