"""Groups: what the queue keeps in RAM of the rows of one task, and the record in which they are stored.

A set of rows is a bit mask: bit i is the row at index i. A transition of eight siblings is then a few operations on
integers and one put of one record, and a group is never half stored. Payload is not here: `frames` says where it is.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from orjson import Fragment

from meshrl.contract.types import Json, Outcome, RowFacts, Siblings, Uid, Version
from meshrl.transferqueue.model.masks import bits, hexed
from meshrl.transferqueue.records import encode_record, fragment

if TYPE_CHECKING:
    from meshrl.transferqueue.model.fair_share import Holder
    from meshrl.transferqueue.operations.batches import TakenBatch

_GROUP = struct.Struct(">IQ")
_FRAME = struct.Struct(">I")
OUTCOMES = tuple(Outcome)

Counts = tuple[int, int, int, int, int, int]
"""Rows by state, in the order of ledger.State."""
NONE: Counts = (0, 0, 0, 0, 0, 0)


def task_key(run_number: int, number: int) -> bytes:
    """Of a task's frame, which outlives its group where a dead letter keeps it."""
    return b"t" + _GROUP.pack(run_number, number)


class TaskMetadata(NamedTuple):
    """What of the task decides when its rows' turn comes."""

    priority: int = 0
    data_source: str = ""
    difficulty: float = 0.0


@dataclass(slots=True, eq=False)
class Grant:
    """Rows of one group in the hands of one worker for one stage."""

    group: Group
    stage: int
    token: int
    worker: str
    mask: int
    """Rows held still; 0 when it has ended."""
    since: float
    """Monotonic seconds; begins anew when the queue opens."""
    deadline: float
    """On the clock of waiting.Expiry."""
    holder: Holder | None = None
    """The books of the worker, where they are kept."""
    heard: bool = False
    """It was renewed: its rows have arrived."""


@dataclass(slots=True, eq=False)
class StoredFrame:
    """Columns that one stage wrote for some rows at once."""

    stage: int
    number: int
    rows: tuple[int, ...]
    """Indices, in the order in which they lie in the frame."""
    nbytes: int
    live: int
    """Rows that are here still; the frame goes with the last of them."""
    seal: int
    """The frame's checksum: what is read back is this frame and no other."""
    partial: bool = False
    """What a stage has made so far of rows that it has not written yet (`append`)."""


@dataclass(slots=True, eq=False)
class Group:
    """The rows of one task that are in the queue now. Lists have an entry per stage, inner lists one per index."""

    run: str
    run_number: int
    number: int
    """Order of admission; a re-issued group keeps its own, so it stays the oldest."""
    task_id: str
    size: int
    metadata: TaskMetadata
    task_bytes: int
    attempts: list[int]
    """The last attempt made at each index."""
    done: list[int]
    """Masks: what each stage has written."""
    held: list[int]
    """Masks: what is granted for each stage."""
    deliveries: list[list[int]]
    """How often each row was handed to each stage."""
    writers: list[list[int]]
    """The fencing token under which each stage was written: a repeated write is known by it."""
    facts: list[RowFacts | None]
    replacements: list[int]
    """Per index: dead rows that the present one replaces (`replace_sibling`)."""
    facts_json: Fragment | None = None
    """`facts` as they are stored, once that was asked for: they change once and are stored many times."""
    present: int = 0
    """Mask of the rows that are here."""
    dead: int = 0
    """Mask of the indices whose row was dead-lettered."""
    grants: list[Grant] = field(default_factory=list)
    frames: list[StoredFrame] = field(default_factory=list)
    next_frame: int = 0
    recorded_progress: list[int] = field(default_factory=list)
    """Per index: entries of the first stage's partial columns; empty where nothing was ever appended."""
    counts: Counts = NONE
    """What the books count of this group now."""
    complete: bool = False
    """Offered to the sampler (or to the replay)."""
    batch: TakenBatch | None = None
    position: int = -1
    """Place in the order of all takes: what a replay follows. -1: never taken."""
    since: float = 0.0
    """When a row last changed hands; monotonic seconds."""
    lost_by: dict[int, str] = field(default_factory=dict)
    """Per index: the worker whose lease on the row expired last."""
    suffix: bytes = field(init=False)
    """Names the group in every key."""
    key: bytes = field(init=False)
    """Of the group's record."""
    task_key: bytes = field(init=False)
    """Of the task's frame."""

    def __post_init__(self) -> None:
        self.suffix = _GROUP.pack(self.run_number, self.number)
        self.key = b"g" + self.suffix
        self.task_key = task_key(self.run_number, self.number)

    @classmethod
    def fresh(
        cls,
        run: str,
        run_number: int,
        number: int,
        task_id: str,
        *,
        metadata: TaskMetadata,
        task_bytes: int,
        attempts: list[int],
        stages: int,
    ) -> Group:
        """A group without rows; `add_row` puts them in."""
        size = len(attempts)
        return cls(
            *(run, run_number, number, task_id, size, metadata, task_bytes, attempts),
            done=[0] * stages,
            held=[0] * stages,
            deliveries=[[0] * size for _ in range(stages)],
            writers=[[0] * size for _ in range(stages)],
            facts=[None] * size,
            replacements=[0] * size,
        )

    # --- names

    def frame_key(self, number: int) -> bytes:
        """Of a frame of columns."""
        return b"c" + self.suffix + _FRAME.pack(number)

    def uid(self, index: int) -> Uid:
        """The name of the row at `index`."""
        return Uid(self.run, self.task_id, index, self.attempts[index])

    def attempts_at(self, indices: Sequence[int]) -> tuple[int, ...]:
        """The attempt of each of these rows."""
        return tuple([self.attempts[index] for index in indices])

    # --- sets of rows

    def mask_of(self, rows: Siblings) -> int:
        """The set of `rows`; 0 unless exactly these attempts of them are all here."""
        if rows.indices == bits(self.present) and list(rows.attempts) == self.attempts:
            return self.present
        mask = 0
        for index, attempt in zip(rows.indices, rows.attempts, strict=True):
            if not 0 <= index < self.size or self.attempts[index] != attempt:
                return 0
            mask |= 1 << index
        return mask if mask & self.present == mask else 0

    def has(self, index: int, attempt: int) -> bool:
        """True when exactly this attempt is here."""
        return (
            0 <= index < self.size
            and bool(self.present >> index & 1)
            and self.attempts[index] == attempt
        )

    @property
    def finished(self) -> int:
        """Mask of the rows that have every column."""
        mask = self.present
        for done in self.done:
            mask &= done
        return mask

    @property
    def unfinished(self) -> int:
        """Mask of the rows that lack a column."""
        return self.present & ~self.finished

    def leasable(self, stage: int, needs: Sequence[int]) -> int:
        """Mask of the rows that have what `needs` (stages) write, and whose `stage` nobody has done or does."""
        mask = self.present & ~self.done[stage] & ~self.held[stage]
        for need in needs:
            mask &= self.done[need]
        return mask

    def held_under(self, stage: int, token: int) -> int:
        """Mask of the rows that are granted for `stage` under `token`."""
        mask = 0
        for grant in self.grants:
            if grant.stage == stage and grant.token == token:
                mask |= grant.mask
        return mask

    @property
    def nbytes(self) -> int:
        """Payload of the group."""
        return self.task_bytes + sum([frame.nbytes for frame in self.frames])

    @property
    def num_tokens(self) -> int:
        """Tokens of the rows whose number is known."""
        return sum([facts.num_tokens for facts in self.facts_of(self.present)])

    def facts_of(self, mask: int) -> list[RowFacts]:
        """The facts of those rows in `mask` that have some."""
        return [facts for index in bits(mask) if (facts := self.facts[index]) is not None]

    # --- changes

    def set_facts(self, indices: Sequence[int], facts: Sequence[RowFacts | None]) -> None:
        """What is known of the rows at `indices`."""
        for index, of_row in zip(indices, facts, strict=True):
            self.facts[index] = of_row
        self.facts_json = None

    def add_row(self, index: int, now: float) -> None:
        """The attempt of `attempts[index]` is here, fresh."""
        bit = 1 << index
        self.present |= bit
        for stage in range(len(self.done)):
            self.done[stage] &= ~bit
            self.deliveries[stage][index] = self.writers[stage][index] = 0
        self.set_facts([index], [None])
        self.replacements[index] = 0
        if self.recorded_progress:
            self.recorded_progress[index] = 0
        self.lost_by.pop(index, None)
        self.since = now

    def let_go(self, stage: int, mask: int) -> None:
        """Rows in `mask` are granted for `stage` no more."""
        self.held[stage] &= ~mask
        ended = False
        for grant in self.grants:
            if grant.stage == stage:
                if grant.holder is not None:
                    grant.holder.rows -= (grant.mask & mask).bit_count()
                grant.mask &= ~mask
                ended = ended or not grant.mask
        if ended:
            self.grants = [grant for grant in self.grants if grant.mask]

    def drop_rows(self, mask: int) -> list[StoredFrame]:
        """Rows in `mask` are here no more; returns the frames that went with the last of their rows."""
        self.present &= ~mask
        for stage in range(len(self.done)):
            self.let_go(stage, mask)
        for frame in self.frames:
            frame.live &= ~mask
        return self._dropped()

    def drop_columns(
        self, stages: Collection[int], mask: int, *, partial: bool
    ) -> list[StoredFrame]:
        """What `stages` wrote (or appended) of the rows in `mask` is not needed; returns frames that went whole."""
        for frame in self.frames:
            if frame.stage in stages and frame.partial is partial:
                frame.live &= ~mask
        return self._dropped()

    def _dropped(self) -> list[StoredFrame]:
        gone = [frame for frame in self.frames if not frame.live]
        if gone:
            self.frames = [frame for frame in self.frames if frame.live]
        return gone

    # --- the record

    def encode(self) -> bytes:
        """The record of the group and its rows. Masks are text, because JSON's integers end at 64 bits."""
        if self.facts_json is None:
            self.facts_json = fragment([facts and _stored_facts(facts) for facts in self.facts])
        return encode_record(
            [
                self.number,
                self.task_id,
                tuple(self.metadata),
                self.task_bytes,
                self.attempts,
                hexed(self.present),
                hexed(self.dead),
                self.position,
                -1 if self.batch is None else self.batch.number,
                list(map(hexed, self.done)),
                self.deliveries,
                self.writers,
                self.replacements,
                self.facts_json,
                [
                    (f.stage, f.number, f.rows, f.nbytes, hexed(f.live), f.seal, f.partial)
                    for f in self.frames
                ],
                self.next_frame,
                self.recorded_progress,
                [(g.stage, g.token, g.worker, hexed(g.mask)) for g in self.grants],
            ]
        )

    @classmethod
    def restored(cls, run: str, run_number: int, stored: Json, now: float) -> tuple[Group, int]:
        """The inverse of `encode`, with the number of its batch (-1: none). Leases get no deadline yet."""
        number, task_id, metadata, task_bytes, attempts, present, dead, position, batch, *rest = (
            stored
        )
        done, deliveries, writers, replacements, facts, frames, next_frame, *rest = rest
        recorded_progress, grants = rest
        group = cls(
            *(
                run,
                run_number,
                number,
                task_id,
                len(attempts),
                TaskMetadata(*metadata),
                task_bytes,
                attempts,
            ),
            done=[int(mask, 16) for mask in done],
            held=[0] * len(done),
            deliveries=deliveries,
            writers=writers,
            facts=[fact and _restored_facts(fact) for fact in facts],
            replacements=replacements,
            present=int(present, 16),
            dead=int(dead, 16),
            frames=[
                StoredFrame(stage, own, tuple(rows), nbytes, int(live, 16), seal, partial)
                for stage, own, rows, nbytes, live, seal, partial in frames
            ],
            next_frame=next_frame,
            recorded_progress=recorded_progress,
            position=position,
            since=now,
        )
        for stage, token, worker, mask in grants:
            grant = Grant(group, stage, token, worker, int(mask, 16), now, now)
            group.grants.append(grant)
            group.held[stage] |= grant.mask
        return group, batch


def _stored_facts(facts: RowFacts) -> Json:
    outcome, num_tokens, (epoch, step), (newest_epoch, newest_step), reason = facts
    return OUTCOMES.index(outcome), num_tokens, epoch, step, newest_epoch, newest_step, reason


def _restored_facts(stored: Json) -> RowFacts:
    outcome, num_tokens, oldest_epoch, oldest_step, newest_epoch, newest_step, reason = stored
    return RowFacts(
        outcome=OUTCOMES[outcome],
        num_tokens=num_tokens,
        oldest=Version(oldest_epoch, oldest_step),
        newest=Version(newest_epoch, newest_step),
        finish_reason=reason,
    )
