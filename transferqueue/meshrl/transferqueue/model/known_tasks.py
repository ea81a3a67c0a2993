"""The ids of the tasks that were admitted: a feeder that repeats a task changes nothing."""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterable

from meshrl.transferqueue.commit_log import CommitLog
from meshrl.transferqueue.records import encode_record
from meshrl.transferqueue.store import Table

REMEMBERED = 20_000
"""Tasks that left whose ids are still known. A feeder that repeats tasks is at most one call behind its cursor, and
never further than what may be admitted and not consumed."""


class KnownTasks:
    """The known tasks of one run, each with the number of its group."""

    def __init__(self, run_number: int, commit_log: CommitLog) -> None:
        self._prefix = b"n" + run_number.to_bytes(4, "big")
        self._commit_log = commit_log
        self._numbers: dict[str, int] = {}
        self._departed: deque[str] = deque()
        """Known tasks that left, in that order; the oldest are forgotten."""

    def __contains__(self, task_id: object) -> bool:
        return task_id in self._numbers

    def __len__(self) -> int:
        return len(self._numbers)

    def add(self, task_id: str, number: int) -> None:
        """A task was admitted as group `number`."""
        self._numbers[task_id] = number
        self._commit_log.put(Table.META, self._key(task_id), encode_record(number))

    def mark_departed(self, task_id: str) -> None:
        """The task left for good."""
        self._departed.append(task_id)

    def forget(self, resident: Container[str]) -> None:
        """Forget the tasks that left longest ago beyond REMEMBERED, except those that are `resident` again."""
        while len(self._departed) > REMEMBERED:
            task_id = self._departed.popleft()
            if task_id not in resident and task_id in self._numbers:
                del self._numbers[task_id]
                self._commit_log.delete(Table.META, self._key(task_id))

    def restore(self, items: Iterable[tuple[bytes, int]]) -> None:
        """From the stored records: key and group number of each."""
        self._numbers = {key[len(self._prefix) :].decode(): number for key, number in items}

    def restore_departed(self, needed: Container[str]) -> None:
        """Every known task that is not `needed` has left, in the order of admission."""
        departed = [task_id for task_id in self._numbers if task_id not in needed]
        self._departed.extend(sorted(departed, key=self._numbers.__getitem__))

    def _key(self, task_id: str) -> bytes:
        return self._prefix + task_id.encode()
