"""The ledger of one run: counts in which state every admitted row is, or how it left."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from enum import StrEnum
from operator import add, sub

from meshrl.contract.types import Json, Ledger

REASON_CHARS = 120
REASONS = 64
"""Distinct reasons that one exit keeps; the others are counted together, so that the ledger stays small."""
OTHER = "other reasons"


class State(StrEnum):
    """The state of a resident row."""

    QUEUED = "queued"
    """No column yet, leased by no worker."""
    LEASED = "leased"
    """No column yet, leased by a worker of a first stage."""
    PENDING = "pending"
    """It has some columns and lacks some."""
    READY = "ready"
    """It has every column."""
    TAKEN = "taken"
    """It is in a batch that a trainer took."""
    SETTLED = "settled"
    """It is in an optimizer step that no checkpoint covers yet."""


class Exit(StrEnum):
    """How a row leaves."""

    TRAINED = "trained"
    FILTERED = "filtered"
    STALE = "stale"
    DEAD = "dead_lettered"


class RunLedger:
    """Counts the rows that came in, that are resident and that left.

    The counts of what came in and left are stored with every transition. The resident rows are counted again from the
    rows themselves when the queue opens, so `balanced` compares two independent sources.
    """

    def __init__(self) -> None:
        self.admitted = 0
        self.exits: dict[Exit, Counter[str]] = {exit_: Counter() for exit_ in Exit}
        self.resident = [0] * len(State)
        """Rows by state, in the order of State."""

    @property
    def unstarted(self) -> int:
        """Rows that have no column yet."""
        queued, leased, *_ = self.resident
        return queued + leased

    def admit(self, rows: int) -> None:
        """`rows` came in."""
        self.admitted += rows

    def move(self, old: Sequence[int], new: Sequence[int]) -> None:
        """A group's rows change from the counts `old` to `new`, by state."""
        self.resident = list(map(add, self.resident, map(sub, new, old)))

    def leave(self, rows: int, exit_: Exit, reason: str) -> None:
        """`rows` left; `move` says in which state they were."""
        reasons = self.exits[exit_]
        key = reason[:REASON_CHARS]
        reasons[key if key in reasons or len(reasons) < REASONS else OTHER] += rows

    def snapshot(self, run: str) -> Ledger:
        """The counts now."""
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
        """As stored: everything but the resident rows."""
        exits = {exit_.value: dict(reasons) for exit_, reasons in self.exits.items()}
        return {"admitted": self.admitted, **exits}

    @classmethod
    def restored(cls, totals: Json) -> RunLedger:
        """From stored totals; the resident rows are counted as their groups are restored."""
        ledger = cls()
        ledger.admitted = totals["admitted"]
        for exit_ in Exit:
            ledger.exits[exit_].update(totals[exit_.value])
        return ledger
