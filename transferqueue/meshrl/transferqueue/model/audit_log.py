"""The trail: rows that came in and rows that left, transition by transition, beside the books and not from them.

    verb ──note──▶ pending ──Run.save──▶ one record a transition ──beyond KEPT records──▶ folded into one sum

The books are counters that each verb moves; the trail says of which task how many rows moved, and why. `meshrl ledger
--audit` adds it up anew and compares. Stored in META: x records, y the sum of those that were folded.
"""

from __future__ import annotations

from collections import Counter, deque
from typing import Final, TypeAlias

from meshrl.contract.types import Json
from meshrl.transferqueue.commit_log import CommitLog
from meshrl.transferqueue.records import encode_record
from meshrl.transferqueue.store import Table

KEPT: Final = 1024
"""Records that are kept one by one."""
ADMITTED: Final = "admitted"

Entry: TypeAlias = tuple[str, int, str, str]
"""Task, rows, `admitted` or the way out, reason."""
Sums: TypeAlias = Counter[str]
"""Rows by `admitted` or the way out."""


def summed(entries: list[Entry]) -> Sums:
    """The entries of one record."""
    sums: Sums = Counter()
    for _, rows, way, _ in entries:
        sums[way] += rows
    return sums


class AuditLog:
    """Of one run."""

    def __init__(self, run_number: int) -> None:
        self._run = run_number.to_bytes(4, "big")
        self._pending: list[Entry] = []
        self._records: deque[tuple[int, list[Entry]]] = deque()
        self._next = 0
        self.folded: Sums = Counter()

    @property
    def key(self) -> bytes:
        """Of the record of what was folded."""
        return b"y" + self._run

    def encode(self) -> bytes:
        """What was folded."""
        return encode_record(dict(self.folded))

    def note(self, task: str, rows: int, way: str, reason: str = "") -> None:
        """`rows` of `task` came in or left."""
        self._pending.append((task, rows, way, reason))

    def stage(self, commit_log: CommitLog) -> None:
        """Store what was noted since, in the transaction of the rows themselves."""
        if not self._pending:
            return
        entries, self._pending = self._pending, []
        commit_log.put(Table.META, self._key(self._next), encode_record(entries))
        self._records.append((self._next, entries))
        self._next += 1
        if len(self._records) > KEPT:
            number, oldest = self._records.popleft()
            self.folded.update(summed(oldest))
            commit_log.delete(Table.META, self._key(number))
            commit_log.touch(self)

    def restore(self, folded: Json, records: list[tuple[bytes, Json]]) -> None:
        """From the stored records, in key order."""
        self.folded = Counter(folded)
        for key, entries in records:
            number = int.from_bytes(key[5:], "big")
            self._records.append((number, [tuple(entry) for entry in entries]))
            self._next = number + 1

    def sums(self) -> Sums:
        """Everything that ever came in and left."""
        total = Counter(self.folded)
        for _, entries in self._records:
            total.update(summed(entries))
        return total

    def open_rows(self) -> Counter[str] | None:
        """Rows by task that came in and did not leave; None once something was folded."""
        if self.folded:
            return None
        here: Counter[str] = Counter()
        for _, entries in self._records:
            for task, rows, way, _ in entries:
                here[task] += rows if way == ADMITTED else -rows
        return +here

    def _key(self, number: int) -> bytes:
        return b"x" + self._run + number.to_bytes(8, "big")
