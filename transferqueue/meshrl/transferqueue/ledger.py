"""The books of one run: every admitted row is in exactly one place, and each move is one entry."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from enum import StrEnum

from meshrl.contract.nouns import Json, Ledger

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


class Books:
    """Counts rows.

    What left is stored with every transition; what is resident is counted anew from the rows themselves when the
    queue opens, so `balanced` compares two independent sources.
    """

    def __init__(self) -> None:
        self.admitted = 0
        self.exits: dict[Exit, Counter[str]] = {exit_: Counter() for exit_ in Exit}
        self.resident: Counter[State] = Counter({state: 0 for state in State})

    def admit(self, rows: int) -> None:
        """`rows` came in, as queued."""
        self.admitted += rows
        self.resident[State.QUEUED] += rows

    def move(self, old: State, new: State) -> None:
        """One row changed its state."""
        self.resident[old] -= 1
        self.resident[new] += 1

    def leave(self, state: State, exit_: Exit, reason: str) -> None:
        """One row left from `state`."""
        self.resident[state] -= 1
        reasons = self.exits[exit_]
        key = reason[:REASON_CHARS]
        reasons[key if key in reasons or len(reasons) < REASONS else OTHER] += 1

    def snapshot(self, run: str) -> Ledger:
        """The ledger as it is now."""
        return Ledger(
            run=run,
            admitted=self.admitted,
            trained=self.exits[Exit.TRAINED].total(),
            filtered=dict(self.exits[Exit.FILTERED]),
            stale=dict(self.exits[Exit.STALE]),
            dead_lettered=dict(self.exits[Exit.DEAD]),
            resident={state.value: count for state, count in self.resident.items()},
        )

    def totals(self) -> Json:
        """What is stored: everything but the resident rows."""
        exits = {exit_.value: dict(reasons) for exit_, reasons in self.exits.items()}
        return {"admitted": self.admitted, **exits}

    @classmethod
    def restored(cls, totals: Json, resident: Iterable[State]) -> Books:
        """Books from stored totals and the states of the rows that are there."""
        books = cls()
        books.admitted = totals["admitted"]
        for exit_ in Exit:
            books.exits[exit_].update(totals[exit_.value])
        books.resident.update(resident)
        return books
