"""Dead letters: rows that were given up, each with what a replay needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshrl.contract.types import DeadLetter, Json, Outcome, Uid
from meshrl.transferqueue.model.group import TaskMetadata
from meshrl.transferqueue.store import encode_record


@dataclass(slots=True, eq=False)
class DeadRow:
    """A dead letter, with what a replay needs when the group has left."""

    run_number: int
    number: int
    letter: DeadLetter
    group: int
    metadata: TaskMetadata
    task_bytes: int
    attempts: list[int]
    """The last attempt at every index of the group, as of the time when the group left."""

    @property
    def key(self) -> bytes:
        """The key of the record."""
        return b"d" + self.run_number.to_bytes(4, "big") + self.number.to_bytes(8, "big")

    def encode(self) -> bytes:
        """The record."""
        letter = self.letter
        return encode_record(
            [
                *(self.number, str(letter.uid), letter.stage, letter.outcome, letter.reason),
                *(letter.attempts, self.group, tuple(self.metadata), self.task_bytes),
                self.attempts,
            ]
        )

    @classmethod
    def restored(cls, run_number: int, stored: Json) -> DeadRow:
        """The inverse of `encode`."""
        number, uid, stage, outcome, reason, tried, group, metadata, task_bytes, attempts = stored
        letter = DeadLetter(
            uid=Uid.parse(uid),
            stage=stage,
            outcome=Outcome(outcome),
            reason=reason,
            attempts=tried,
        )
        return cls(run_number, number, letter, group, TaskMetadata(*metadata), task_bytes, attempts)


class DeadLetters:
    """The dead rows of a run, in the order in which they died."""

    def __init__(self) -> None:
        self.by_uid: dict[Uid, DeadRow] = {}
        self._by_group: dict[int, list[DeadRow]] = {}

    def add(self, row: DeadRow) -> None:
        """A row died."""
        self.by_uid[row.letter.uid] = row
        self._by_group.setdefault(row.group, []).append(row)

    def remove(self, row: DeadRow) -> None:
        """The row was replayed."""
        del self.by_uid[row.letter.uid]
        rows = self._by_group[row.group]
        rows.remove(row)
        if not rows:
            del self._by_group[row.group]

    def of_group(self, number: int) -> Sequence[DeadRow]:
        """The dead rows of a group: while there are any, the task's payload stays stored."""
        return self._by_group.get(number, ())
