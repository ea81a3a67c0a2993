"""The audit log: which rows came in and which left, one record per transition, independent of the ledger.

    operation ──note──▶ pending ──Run.save──▶ one record per transition ──beyond MAX_RECORDS──▶ added to one sum

The ledger is counters that each operation moves; the audit log names the task, the number of rows and the reason.
`meshrl ledger --audit` adds it up and compares. Stored in META: x the records, y the sum of the older ones.
"""

from __future__ import annotations

from collections import Counter, deque
from typing import Final, TypeAlias

from meshrl.contract.types import Json
from meshrl.transferqueue.store import CommitLog, Table, encode_record

MAX_RECORDS: Final = 1024
"""Records that are kept singly; older ones are added to one sum."""
ADMITTED: Final = "admitted"

Entry: TypeAlias = tuple[str, int, str, str]
"""Task, rows, `admitted` or the exit, reason."""
Sums: TypeAlias = Counter[str]
"""Rows by `admitted` or the exit."""


def summed(entries: list[Entry]) -> Sums:
    """The sum of one record's entries."""
    sums: Sums = Counter()
    for _, rows, exit_, _ in entries:
        sums[exit_] += rows
    return sums


class AuditLog:
    """The audit log of one run."""

    def __init__(self, run_number: int) -> None:
        self._run = run_number.to_bytes(4, "big")
        self._pending: list[Entry] = []
        self._records: deque[tuple[int, list[Entry]]] = deque()
        self._next = 0
        self.older: Sums = Counter()

    @property
    def key(self) -> bytes:
        """The key of the record of the sum."""
        return b"y" + self._run

    def encode(self) -> bytes:
        """The record of the sum."""
        return encode_record(dict(self.older))

    def note(self, task: str, rows: int, exit_: str, reason: str = "") -> None:
        """`rows` of `task` came in (`admitted`) or left."""
        self._pending.append((task, rows, exit_, reason))

    def stage(self, commit_log: CommitLog) -> None:
        """Store what was noted since the last call, in the transaction of the rows themselves."""
        if not self._pending:
            return
        entries, self._pending = self._pending, []
        commit_log.put(Table.META, self._key(self._next), encode_record(entries))
        self._records.append((self._next, entries))
        self._next += 1
        if len(self._records) > MAX_RECORDS:
            number, oldest = self._records.popleft()
            self.older.update(summed(oldest))
            commit_log.delete(Table.META, self._key(number))
            commit_log.touch(self)

    def restore(self, older: Json, records: list[tuple[bytes, Json]]) -> None:
        """From the stored records, in key order."""
        self.older = Counter(older)
        for key, entries in records:
            number = int.from_bytes(key[5:], "big")
            self._records.append((number, [tuple(entry) for entry in entries]))
            self._next = number + 1

    def sums(self) -> Sums:
        """All rows that ever came in and left."""
        total = Counter(self.older)
        for _, entries in self._records:
            total.update(summed(entries))
        return total

    def open_rows(self) -> Counter[str] | None:
        """Rows by task that came in and did not leave; None if older records exist only as a sum."""
        if self.older:
            return None
        rows_of: Counter[str] = Counter()
        for _, entries in self._records:
            for task, rows, exit_, _ in entries:
                rows_of[task] += rows if exit_ == ADMITTED else -rows
        return +rows_of

    def _key(self, number: int) -> bytes:
        return b"x" + self._run + number.to_bytes(8, "big")
