"""Rows and groups: what the queue keeps in RAM of each, and the record in which a group is stored.

Payload (columns, prompts) is never here. A group and its rows are one record: a transition of eight siblings is one
put, and a group is never half stored.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from meshrl.contract.nouns import Json, Outcome, RowFacts, Uid, Version
from meshrl.transferqueue.frames import seal_json
from meshrl.transferqueue.ledger import State

if TYPE_CHECKING:
    from meshrl.transferqueue.batches import TakenBatch

_GROUP = struct.Struct(">IQ")
_FRAME = struct.Struct(">HIB")
OUTCOMES = tuple(Outcome)


@dataclass(slots=True, eq=False)
class Held:
    """A row in the hands of one worker for one stage."""

    row: Row
    stage: int
    token: int
    worker: str
    since: float
    """Monotonic seconds; like `deadline`, begins anew when the queue opens."""
    deadline: float
    spared: bool = False
    """Its deadline passed while the queue itself stood still; see waiting.py."""


@dataclass(slots=True, eq=False)
class Row:
    """One row. What a stage has done is a bit of `done`; lists have one entry per stage."""

    group: Group
    index: int
    attempt: int
    deliveries: list[int]
    """How often the row was handed to each stage."""
    writers: list[int]
    """The fencing token under which each stage was written: a repeated write is known by it."""
    done: int = 0
    state: State = State.QUEUED
    facts: RowFacts | None = None
    nbytes: int = 0
    """Payload of all columns written so far."""
    replacements: int = 0
    """Dead rows of this index that this row replaces (`replace_sibling`)."""
    held: dict[int, Held] = field(default_factory=dict)
    since: float = 0.0
    """When the row last changed hands; monotonic seconds."""
    lost_by: str = ""
    """The worker whose lease on the row expired last."""

    @property
    def uid(self) -> Uid:
        """The row's name."""
        return Uid(self.group.run, self.group.task_id, self.index, self.attempt)

    def frame_key(self, stage: int) -> bytes:
        """Where the columns of a stage are stored."""
        return b"c" + self.group.suffix + _FRAME.pack(self.index, self.attempt, stage)

    def stored(self) -> Json:
        """The row's part of the group's record."""
        facts = self.facts
        return [
            self.index,
            self.attempt,
            self.replacements,
            self.done,
            self.nbytes,
            self.deliveries,
            self.writers,
            [[held.stage, held.token, held.worker] for held in self.held.values()],
            facts
            and [
                OUTCOMES.index(facts.outcome),
                facts.num_tokens,
                *(facts.oldest.epoch, facts.oldest.step, facts.newest.epoch, facts.newest.step),
                facts.finish_reason,
            ],
        ]

    @classmethod
    def restored(cls, group: Group, stored: Json, now: float) -> Row:
        """The inverse of `stored`. Leases get their deadline from whoever restores them."""
        index, attempt, replacements, done, nbytes, deliveries, writers, held, facts = stored
        row = cls(group, index, attempt, deliveries, writers, done=done, nbytes=nbytes, since=now)
        row.replacements = replacements
        for stage, token, worker in held:
            row.held[stage] = Held(row, stage, token, worker, now, now)
        if facts:
            outcome, num_tokens, *versions, finish_reason = facts
            row.facts = RowFacts(
                outcome=OUTCOMES[outcome],
                num_tokens=num_tokens,
                oldest=Version(versions[0], versions[1]),
                newest=Version(versions[2], versions[3]),
                finish_reason=finish_reason,
            )
        return row


@dataclass(slots=True, eq=False)
class Group:
    """The rows of one task that are in the queue now, by index."""

    run: str
    run_number: int
    number: int
    """Order of admission; a re-issued group keeps its own, so it stays the oldest."""
    task_id: str
    size: int
    priority: int
    task_bytes: int
    attempts: list[int]
    """The last attempt made at each index."""
    rows: dict[int, Row] = field(default_factory=dict)
    dead: set[int] = field(default_factory=set)
    """Indices whose row was dead-lettered."""
    ready: int = 0
    """Rows that have every column."""
    complete: bool = False
    """Offered to the sampler (or to the replay)."""
    batch: TakenBatch | None = None
    position: int = -1
    """Place in the order of all takes: what a replay follows. -1: never taken."""

    @property
    def suffix(self) -> bytes:
        """Names the group in every key."""
        return _GROUP.pack(self.run_number, self.number)

    @property
    def key(self) -> bytes:
        """Of the group's record."""
        return b"g" + self.suffix

    @property
    def task_key(self) -> bytes:
        """Of the task's frame."""
        return b"t" + self.suffix

    @property
    def nbytes(self) -> int:
        """Payload of the group."""
        return self.task_bytes + sum(row.nbytes for row in self.rows.values())

    @property
    def unfinished(self) -> int:
        """Rows that lack a column."""
        return len(self.rows) - self.ready

    def ordered(self) -> list[Row]:
        """The rows by index."""
        return [self.rows[index] for index in sorted(self.rows)]

    def fresh_row(self, index: int, stages: int, now: float) -> Row:
        """Add the next attempt at `index`."""
        row = Row(self, index, self.attempts[index], [0] * stages, [0] * stages, since=now)
        self.rows[index] = row
        return row

    def encode(self) -> bytes:
        """The record of the group and its rows."""
        return seal_json(
            [
                self.number,
                self.task_id,
                self.size,
                self.priority,
                self.task_bytes,
                self.attempts,
                sorted(self.dead),
                self.position,
                -1 if self.batch is None else self.batch.number,
                [row.stored() for row in self.rows.values()],
            ]
        )

    @classmethod
    def restored(cls, run: str, run_number: int, stored: Json, now: float) -> tuple[Group, int]:
        """The inverse of `encode`, with the number of its batch (-1: none)."""
        number, task_id, size, priority, task_bytes, attempts, dead, position, batch, rows = stored
        group = cls(run, run_number, number, task_id, size, priority, task_bytes, attempts)
        group.dead = set(dead)
        group.position = position
        for row in rows:
            group.rows[row[0]] = Row.restored(group, row, now)
        return group, batch


def facts_of(rows: Iterable[Row]) -> Iterator[RowFacts]:
    """The facts of rows that have some."""
    return (row.facts for row in rows if row.facts is not None)
