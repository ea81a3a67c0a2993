"""The records of a run beside its groups: state, ledger, audit log, known tasks, batches, dead letters.

The ledger is counters that each operation moves; the audit log names the task, the number of rows and the reason.

    operation ──note──▶ pending ──Run.save──▶ one record per transition ──beyond MAX_RECORDS──▶ added to one sum

`meshrl ledger --audit` adds the audit log up and compares. Stored in META: x its records, y the sum
of the older ones. Every transition rewrites the state and the ledger, which are one record. The ids of tasks are kept
so that a feeder that repeats a task changes nothing.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from operator import add, sub
from typing import Final, NamedTuple, TypeAlias

from meshrl.contract.types import (
    DeadLetter,
    Json,
    Ledger,
    Outcome,
    Uid,
    Version,
)
from meshrl.transferqueue.store import CommitLog, Table, encode_record

REMEMBERED = 20_000
"""Tasks that left whose ids are still known. A feeder that repeats tasks is at most one call behind its cursor, and
never further than what may be admitted and not consumed."""


class TaskMetadata(NamedTuple):
    """The properties of a task that decide in which order its rows are leased and taken."""

    priority: int = 0
    data_source: str = ""
    difficulty: float = 0.0


UNPUBLISHED = Version(0, 0)


@dataclass(slots=True, eq=False)
class RunRecord:
    """The state of a run itself: versions, the feeder's cursor, counters. The names are those of the stored JSON."""

    epoch: int = 0
    owner: str = ""
    """The trainer that acquired the run last."""
    published: Version = UNPUBLISHED
    cursor: str = ""
    """The feeder's position in its data."""
    feed_closed: bool = False
    committed_step: int = 0
    last_token: int = 0
    """The last fencing token."""
    next_group: int = 0
    next_position: int = 0
    """The position of the next group that is taken for the first time."""
    next_batch: int = 0
    next_dead: int = 0
    dropped_letters: int = 0
    """Dead letters that were dropped because there were too many; stored once there are any."""
    opened_by: str = ""
    """The role that opened the run; stored where callers were identified."""

    def encode(self) -> Json:
        """The record as JSON."""
        return {
            "epoch": self.epoch,
            "owner": self.owner,
            "published": str(self.published),
            "cursor": self.cursor,
            "feed_closed": self.feed_closed,
            "committed_step": self.committed_step,
            "last_token": self.last_token,
            "next_group": self.next_group,
            "next_position": self.next_position,
            "next_batch": self.next_batch,
            "next_dead": self.next_dead,
            **({"dropped_letters": self.dropped_letters} if self.dropped_letters else {}),
            **({"opened_by": self.opened_by} if self.opened_by else {}),
        }

    @classmethod
    def decode(cls, stored: Json) -> RunRecord:
        """The inverse of `encode`. Raises KeyError, TypeError or ValueError for other JSON."""
        return cls(**{**stored, "published": Version.parse(stored["published"])})


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

    def __iter__(self) -> Iterator[str]:
        return iter(self._numbers)

    def add(self, task_id: str, number: int) -> None:
        """Add a task that was admitted as group `number`."""
        self._numbers[task_id] = number
        self._commit_log.put(Table.META, self._prefix + task_id.encode(), encode_record(number))

    def keys(self) -> Iterator[bytes]:
        """The keys of their records."""
        return (self._prefix + task_id.encode() for task_id in self._numbers)

    def mark_departed(self, task_id: str) -> None:
        """Mark a task that has left and will not return."""
        self._departed.append(task_id)

    def forget(self, resident: Container[str]) -> None:
        """Forget the tasks that left longest ago beyond REMEMBERED, except those that are `resident` again."""
        while len(self._departed) > REMEMBERED:
            task_id = self._departed.popleft()
            if task_id not in resident and task_id in self._numbers:
                del self._numbers[task_id]
                self._commit_log.delete(Table.META, self._prefix + task_id.encode())

    def restore(self, items: Iterable[tuple[bytes, int]]) -> None:
        """Restore the numbers from the stored records: key and group number of each."""
        self._numbers = {key[len(self._prefix) :].decode(): number for key, number in items}

    def restore_departed(self, needed: Container[str]) -> None:
        """Mark every known task that is not `needed` as departed, in the order of admission."""
        departed = [task_id for task_id in self._numbers if task_id not in needed]
        self._departed.extend(sorted(departed, key=self._numbers.__getitem__))


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
    """Some columns, not all."""
    READY = "ready"
    """Every column."""
    TAKEN = "taken"
    """In a batch that a trainer took."""
    SETTLED = "settled"
    """In an optimizer step that no checkpoint covers yet."""


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

    def move(self, old: Sequence[int], new: Sequence[int]) -> None:
        """Move a group's rows from the counts `old` to `new`, by state."""
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
        """The stored totals: all counts but the resident rows."""
        exits = {exit_.value: dict(reasons) for exit_, reasons in self.exits.items()}
        return {"admitted": self.admitted, **exits}

    @classmethod
    def restored(cls, totals: Json) -> RunLedger:
        """The ledger of stored totals; resident rows are counted as their groups are restored."""
        ledger = cls()
        ledger.admitted = totals["admitted"]
        for exit_ in Exit:
            ledger.exits[exit_].update(totals[exit_.value])
        return ledger


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
        self.key: Final = b"y" + run_number.to_bytes(4, "big")
        """The key of the record of the sum."""
        self._prefix = b"x" + run_number.to_bytes(4, "big")
        self._pending: list[Entry] = []
        self._records: deque[tuple[int, list[Entry]]] = deque()
        self._next = 0
        self.older: Sums = Counter()

    def encode(self) -> bytes:
        """The record of the sum."""
        return encode_record(dict(self.older))

    def keys(self) -> Iterator[bytes]:
        """The keys of all its records."""
        yield self.key
        for number, _ in self._records:
            yield self._prefix + number.to_bytes(8, "big")

    def note(self, task: str, rows: int, exit_: str, reason: str = "") -> None:
        """`rows` of `task` came in (`admitted`) or left."""
        self._pending.append((task, rows, exit_, reason))

    def stage(self, commit_log: CommitLog) -> None:
        """Store what was noted since the last call, in the transaction of the rows themselves."""
        if not self._pending:
            return
        entries, self._pending = self._pending, []
        key = self._prefix + self._next.to_bytes(8, "big")
        commit_log.put(Table.META, key, encode_record(entries))
        self._records.append((self._next, entries))
        self._next += 1
        if len(self._records) > MAX_RECORDS:
            number, oldest = self._records.popleft()
            self.older.update(summed(oldest))
            commit_log.delete(Table.META, self._prefix + number.to_bytes(8, "big"))
            commit_log.touch(self)

    def restore(self, older: Json, records: list[tuple[bytes, Json]]) -> None:
        """Restore from the stored records, in key order."""
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


@dataclass(slots=True, eq=False)
class TakenBatch:
    """Groups that a trainer holds, or that are in an optimizer step that no checkpoint covers yet."""

    run_number: int
    number: int
    batch_id: str
    step: int
    epoch: int
    settled: bool = False
    consumed: bool = False
    """Its groups hold no admission credit any more; derived, not stored (see model/groups.py)."""
    answered: bool = False
    """A trainer may know its rows: none of them leaves as damaged any more. Not stored."""
    groups: list[int] = field(default_factory=list)
    """Numbers of the groups that `filter` left in it; stored with the groups."""
    key: bytes = field(init=False)
    """The key of the record."""
    manifest_key: bytes = field(init=False)
    """The key of the manifest: what `take` answered, for a caller that asks again."""

    def __post_init__(self) -> None:
        suffix = self.run_number.to_bytes(4, "big") + self.number.to_bytes(8, "big")
        self.key, self.manifest_key = b"b" + suffix, b"m" + suffix

    def encode(self) -> bytes:
        """The record."""
        return encode_record([self.number, self.batch_id, self.step, self.epoch, self.settled])

    @classmethod
    def restored(cls, run_number: int, stored: Json) -> TakenBatch:
        """The inverse of `encode`, without groups."""
        number, batch_id, step, epoch, settled = stored
        return cls(run_number, number, batch_id, step, epoch, settled, answered=True)


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
                self.number,
                str(letter.uid),
                letter.stage,
                letter.outcome,
                letter.reason,
                letter.attempts,
                self.group,
                tuple(self.metadata),
                self.task_bytes,
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
        self.by_group: dict[int, list[DeadRow]] = {}
        """Dead rows by group number: while a group has any, its task's payload stays stored."""
        self.nbytes = 0
        """Bytes of their reasons, and of their tasks, each counted once."""

    def add(self, row: DeadRow) -> None:
        """Add a row that died."""
        self.nbytes += len(row.letter.reason) + (
            0 if row.group in self.by_group else row.task_bytes
        )
        self.by_uid[row.letter.uid] = row
        self.by_group.setdefault(row.group, []).append(row)

    def remove(self, row: DeadRow) -> None:
        """Remove a row that was replayed or dropped."""
        del self.by_uid[row.letter.uid]
        self.nbytes -= len(row.letter.reason)
        rows = self.by_group[row.group]
        rows.remove(row)
        if not rows:
            del self.by_group[row.group]
            self.nbytes -= row.task_bytes
