"""The books of one run: every admitted row is in exactly one place, and each move is one entry."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from enum import StrEnum
from operator import add, sub

from meshrl.contract.types import Json, Ledger

REASON_CHARS = 120
REASONS = 64
"""Distinct reasons that one exit keeps; the rest are counted together, so that the books stay small."""
OTHER = "other reasons"


class State(StrEnum):
    """Where a resident row is."""

    QUEUED = "queued"
    """No column yet, held by nobody."""
    LEASED = "leased"
    """No column yet, held by a worker of a first stage."""
    PENDING = "pending"
    """Between stages: has some columns and lacks some."""
    READY = "ready"
    """Has every column."""
    TAKEN = "taken"
    """In a trainer's batch."""
    SETTLED = "settled"
    """In an optimizer step that no checkpoint covers yet."""


class Exit(StrEnum):
    """How a row leaves."""

    TRAINED = "trained"
    FILTERED = "filtered"
    STALE = "stale"
    DEAD = "dead_lettered"


class RunLedger:
    """Counts rows.

    What left is stored with every transition; what is resident is counted anew from the rows themselves when the
    queue opens, so `balanced` compares two independent sources.
    """

    def __init__(self) -> None:
        self.admitted = 0
        self.exits: dict[Exit, Counter[str]] = {exit_: Counter() for exit_ in Exit}
        self.resident = [0] * len(State)
        """In the order of State."""

    @property
    def unstarted(self) -> int:
        """Rows that have no column yet."""
        queued, leased, *_ = self.resident
        return queued + leased

    def admit(self, rows: int) -> None:
        """`rows` came in."""
        self.admitted += rows

    def move(self, old: Sequence[int], new: Sequence[int]) -> None:
        """A group's rows by state, as they were counted and as they are."""
        self.resident = list(map(add, self.resident, map(sub, new, old)))

    def leave(self, rows: int, exit_: Exit, reason: str) -> None:
        """`rows` left; where they were resident is told by `move`."""
        reasons = self.exits[exit_]
        key = reason[:REASON_CHARS]
        reasons[key if key in reasons or len(reasons) < REASONS else OTHER] += rows

    def snapshot(self, run: str) -> Ledger:
        """The ledger as it is now."""
        return Ledger(
            run=run,
            admitted=self.admitted,
            trained=self.exits[Exit.TRAINED].total(),
            filtered=dict(self.exits[Exit.FILTERED]),
            stale=dict(self.exits[Exit.STALE]),
            dead_lettered=dict(self.exits[Exit.DEAD]),
            resident=dict(zip((state.value for state in State), self.resident, strict=True)),
        )

    def totals(self) -> Json:
        """What is stored: everything but the resident rows."""
        exits = {exit_.value: dict(reasons) for exit_, reasons in self.exits.items()}
        return {"admitted": self.admitted, **exits}

    @classmethod
    def restored(cls, totals: Json) -> RunLedger:
        """RunLedger from stored totals; the rows that are there are counted as they are filed."""
        books = cls()
        books.admitted = totals["admitted"]
        for exit_ in Exit:
            books.exits[exit_].update(totals[exit_.value])
        return books
