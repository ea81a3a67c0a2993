"""A group: what the queue keeps in RAM about the rows of one task, and the record in which it is stored.

A set of rows is a bit mask: bit i is the row at index i. A transition of eight siblings is then a few operations on
integers and one put of one record, and a group is never half stored. The payload is in the store (see `frames`).
Only the modules of `model/` change a group.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from orjson import Fragment

from meshrl.contract.types import Json, Outcome, RowBlock, RowFacts, Uid, Version
from meshrl.transferqueue.model.failures import LastingFault
from meshrl.transferqueue.model.fair_share import Holder
from meshrl.transferqueue.model.records import TakenBatch, TaskMetadata
from meshrl.transferqueue.store import FRAME, encode_record, to_json

_GROUP = struct.Struct(">IQ")
_FRAME = struct.Struct(">I")
OUTCOMES = tuple(Outcome)

Counts = tuple[int, int, int, int, int, int]
"""Rows by state, in the order of records.State."""
NONE: Counts = (0, 0, 0, 0, 0, 0)


@lru_cache(maxsize=4096)
def bits(mask: int) -> tuple[int, ...]:
    """The indices in `mask`, lowest first. Cached, since nearly all masks are of complete groups."""
    indices = []
    while mask:
        low = mask & -mask
        indices.append(low.bit_length() - 1)
        mask ^= low
    return tuple(indices)


@lru_cache(maxsize=4096)
def hexed(mask: int) -> str:
    """`mask` as it is stored. Cached for the same reason."""
    return f"{mask:x}"


def lowest(mask: int, count: int) -> int:
    """The `count` lowest bits of `mask`; all of them if it has fewer."""
    if mask.bit_count() <= count:
        return mask
    result = 0
    for _ in range(count):
        low = mask & -mask
        result |= low
        mask ^= low
    return result


def task_key(run_number: int, number: int) -> bytes:
    """The key of a task's payload, which outlives its group while a dead letter needs it."""
    return b"t" + _GROUP.pack(run_number, number)


@dataclass(slots=True, eq=False)
class Grant:
    """Rows of one group that one worker holds for one stage."""

    group: Group
    stage: int
    token: int
    worker: str
    mask: int
    """Rows that are still held; 0 when the grant has ended."""
    since: float
    """Monotonic seconds at which it was granted; starts again when the queue opens."""
    deadline: float
    """When it expires, on the clock of waiting.Expiry."""
    holder: Holder | None = None
    """The worker's entry in FairShare; None for stages that do not sample."""
    renewed: bool = False
    """Whether it was renewed at least once: the rows reached the worker."""

    def part(self, mask: int) -> Grant:
        """A copy for the rows in `mask`."""
        return Grant(
            self.group,
            self.stage,
            self.token,
            self.worker,
            mask,
            self.since,
            self.deadline,
            self.holder,
            self.renewed,
        )


@dataclass(slots=True, eq=False)
class StoredFrame:
    """Columns that one stage wrote for some rows in one call."""

    stage: int
    number: int
    rows: tuple[int, ...]
    """Row indices, in the order in which they lie in the frame."""
    nbytes: int
    live: int
    """Mask of the rows that still need the frame; it is deleted with the last of them."""
    checksum: int
    """The frame's checksum; a frame that is read back must have it."""
    partial: bool = False
    """Progress of rows that the stage has not written yet (`append`)."""


@dataclass(slots=True, eq=False)
class Group:
    """The rows of one task that are in the queue. Outer lists have one entry per stage, inner lists one per index."""

    run: str
    run_number: int
    number: int
    """Order of admission; a group that is issued again keeps its number, so it stays the oldest."""
    task_id: str
    size: int
    metadata: TaskMetadata
    task_bytes: int
    attempts: list[int]
    """The last attempt made at each index."""
    done: list[int]
    """Masks of the rows that each stage has written."""
    held: list[int]
    """Masks of the rows that are granted for each stage."""
    deliveries: list[list[int]]
    """How often each row was delivered to each stage."""
    writers: list[list[int]]
    """The fencing token under which each stage wrote each row: it identifies a repeated write."""
    facts: list[RowFacts | None]
    replacements: list[int]
    """Per index: how many dead rows the present one replaces (`replace_sibling`)."""
    facts_json: Fragment | None = None
    """`facts` in their stored form, cached: they change once and are stored many times."""
    present: int = 0
    """Mask of the rows that are in the queue."""
    dead: int = 0
    """Mask of the indices whose row was dead-lettered."""
    grants: list[Grant] = field(default_factory=list)
    frames: list[StoredFrame] = field(default_factory=list)
    next_frame: int = 0
    recorded_progress: list[int] = field(default_factory=list)
    """Per index: entries that were appended for the first stage; empty if nothing was ever appended."""
    counts: Counts = NONE
    """How the ledger counts the rows of this group now."""
    complete: bool = False
    """Whether the group is complete and can be taken."""
    batch: TakenBatch | None = None
    deaths: int = 0
    """Trainers that died with these rows in hand since a step was last made of them."""
    failed_in: int = 0
    """Epoch of the last trainer that said that a step of this group alone failed, since then; 0: none did."""
    died_alone: int = 0
    """Trainers that died without a report with this group alone, since then; see `TrainerVerbs.acquire`."""
    settled_before: int = -1
    """How many batches had been settled when the last of them died. Not stored."""
    position: int = -1
    """Place in the order of all takes, which a repeated take follows. -1: never taken."""
    sampled_from: int | None = None
    """The published step when a row was first granted; None: none was. Not stored."""
    since: float = 0.0
    """When a row last changed hands; monotonic seconds."""
    lost_by: dict[int, str] = field(default_factory=dict)
    """Per index: the worker whose lease on the row expired last."""
    lasting: dict[tuple[int, int], LastingFault] = field(default_factory=dict)
    """The fault in the row's last try, by stage and index. Not stored."""
    suffix: bytes = field(init=False)
    """The part of every key that names the group."""
    key: bytes = field(init=False)
    """The key of the group's record."""
    task_key: bytes = field(init=False)
    """The key of the task's payload."""

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
        now: float,
    ) -> Group:
        """A group with a row at every index, none of which has a column."""
        size = len(attempts)
        return cls(
            run,
            run_number,
            number,
            task_id,
            size,
            metadata,
            task_bytes,
            attempts,
            done=[0] * stages,
            held=[0] * stages,
            deliveries=[[0] * size for _ in range(stages)],
            writers=[[0] * size for _ in range(stages)],
            facts=[None] * size,
            replacements=[0] * size,
            present=(1 << size) - 1,
            since=now,
        )

    # --- names

    def frame_key(self, number: int) -> bytes:
        """The key of a frame of columns."""
        return FRAME + self.suffix + _FRAME.pack(number)

    def uid(self, index: int) -> Uid:
        """The name of the row at `index`."""
        return Uid(self.run, self.task_id, index, self.attempts[index])

    # --- sets of rows

    def mask_of(self, rows: RowBlock) -> int:
        """The mask of `rows`; 0 unless exactly these attempts of them are all present."""
        if rows.indices == bits(self.present) and list(rows.attempts) == self.attempts:
            return self.present
        mask = 0
        for index, attempt in zip(rows.indices, rows.attempts, strict=True):
            if not 0 <= index < self.size or self.attempts[index] != attempt:
                return 0
            mask |= 1 << index
        return mask if mask & self.present == mask else 0

    def has(self, index: int, attempt: int) -> bool:
        """True when exactly this attempt is present."""
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
        """Mask of the rows that stages `needs` have written and that `stage` has neither written nor been granted."""
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
        """Bytes of the group's payload."""
        return self.task_bytes + sum([frame.nbytes for frame in self.frames])

    @property
    def num_tokens(self) -> int:
        """Tokens of the rows whose number is known."""
        return sum([facts.num_tokens for facts in self.facts_of(self.present)])

    def facts_of(self, mask: int) -> list[RowFacts]:
        """The facts of the rows in `mask` that have facts."""
        return [facts for index in bits(mask) if (facts := self.facts[index]) is not None]

    def has_failed_before(self, epoch: int) -> bool:
        """Note that a step of it alone failed in `epoch`, unless one failed in another epoch, which is the answer."""
        if self.failed_in not in (0, epoch):
            return True
        self.failed_in = epoch
        return False

    def forget_deaths(self) -> None:
        """Forget trainers' deaths: a step was made of the group, or it is sampled again."""
        self.deaths = self.failed_in = self.died_alone = 0
        self.settled_before = -1

    # --- rows come and go

    def add_row(self, index: int, now: float, *, replacements: int = 0) -> None:
        """Add the attempt `attempts[index]`, with no column."""
        bit = 1 << index
        self.present |= bit
        self.dead &= ~bit
        for stage in range(len(self.done)):
            self.done[stage] &= ~bit
            self.deliveries[stage][index] = self.writers[stage][index] = 0
        self.set_facts([index], [None])
        self.forget_deaths()
        self.replacements[index] = replacements
        if self.recorded_progress:
            self.recorded_progress[index] = 0
        self.lost_by.pop(index, None)
        for stage in range(len(self.done)):
            self.lasting.pop((stage, index), None)
        self.since = now

    def drop_rows(self, mask: int) -> list[StoredFrame]:
        """The rows in `mask` leave; returns the frames that no other row needs."""
        self.present &= ~mask
        for stage in range(len(self.done)):
            self.let_go(stage, mask)
        for frame in self.frames:
            frame.live &= ~mask
        return self._dropped()

    # --- grants

    def add_grant(self, grant: Grant) -> None:
        """Deliver the rows of `grant` to its worker."""
        stage = grant.stage
        if grant.holder is not None:
            grant.holder.hold(grant.mask.bit_count())
        self.grants.append(grant)
        self.held[stage] |= grant.mask
        self.since = grant.since
        deliveries = self.deliveries[stage]
        for index in bits(grant.mask):
            deliveries[index] += 1

    def split_grant(self, grant: Grant, mask: int) -> Grant | None:
        """Reduce `grant` to the rows in `mask`; returns a grant of the others, None if there are none."""
        rest = grant.mask & ~mask
        if not rest:
            return None
        grant.mask &= mask
        other = grant.part(rest)
        self.grants.append(other)
        return other

    def let_go(self, stage: int, mask: int) -> None:
        """End the grants of the rows in `mask` for `stage`."""
        self.held[stage] &= ~mask
        ended = False
        for grant in self.grants:
            if grant.stage == stage:
                if grant.holder is not None:
                    grant.holder.hold(-(grant.mask & mask).bit_count())
                grant.mask &= ~mask
                ended = ended or not grant.mask
        if ended:
            self.grants = [grant for grant in self.grants if grant.mask]

    def undo_delivery(self, stage: int, mask: int) -> None:
        """Undo the delivery of the rows in `mask` to `stage`: it does not count as an attempt."""
        for index in bits(mask):
            self.deliveries[stage][index] -= 1

    # --- columns

    def mark_written(self, stage: int, rows: Sequence[int], mask: int, token: int) -> None:
        """`stage` has written `rows`, whose set is `mask`, under `token`; they are no longer granted."""
        self.let_go(stage, mask)
        self.done[stage] |= mask
        writers = self.writers[stage]
        for index in rows:
            writers[index] = token

    def set_facts(self, indices: Sequence[int], facts: Sequence[RowFacts | None]) -> None:
        """Set the facts of the rows at `indices`."""
        for index, of_row in zip(indices, facts, strict=True):
            self.facts[index] = of_row
        self.facts_json = None

    def set_progress(self, rows: Sequence[int], entries: Sequence[int]) -> None:
        """Set how many `entries` of each row the first stage has appended."""
        self.recorded_progress = self.recorded_progress or [0] * self.size
        for index, count in zip(rows, entries, strict=True):
            self.recorded_progress[index] = count

    def drop_progress(self, stage: int, mask: int) -> list[StoredFrame]:
        """The progress of the rows in `mask` is not needed any more; returns the frames that no row needs."""
        if not self.recorded_progress:
            return []
        for index in bits(mask):
            self.recorded_progress[index] = 0
        return self.drop_columns({stage}, mask, partial=True)

    def undo_stages(self, stages: Collection[int], mask: int) -> list[StoredFrame]:
        """The rows in `mask` go back to before `stages`; returns the frames that no row needs."""
        for stage in stages:
            self.let_go(stage, mask)
            self.done[stage] &= ~mask
            for index in bits(mask):
                self.deliveries[stage][index] = self.writers[stage][index] = 0
        return self.drop_columns(stages, mask, partial=False)

    def drop_columns(
        self, stages: Collection[int], mask: int, *, partial: bool
    ) -> list[StoredFrame]:
        """Columns (or progress) of `stages` of the rows in `mask` go; returns the frames that no row needs."""
        for frame in self.frames:
            if frame.stage in stages and frame.partial is partial:
                frame.live &= ~mask
        return self._dropped()

    def _dropped(self) -> list[StoredFrame]:
        dropped = [frame for frame in self.frames if not frame.live]
        if dropped:
            self.frames = [frame for frame in self.frames if frame.live]
        return dropped

    # --- the record

    def encode(self) -> bytes:
        """The record of the group and its rows. Masks are text, because integers of orjson end at 64 bits."""
        if self.facts_json is None:
            stored: list[Json] = []
            for facts in self.facts:
                if facts is None:
                    stored.append(None)
                    continue
                outcome, num_tokens, oldest, newest, *rest = facts
                stored.append((OUTCOMES.index(outcome), num_tokens, *oldest, *newest, *rest))
            self.facts_json = Fragment(to_json(stored))
        died = (self.deaths, self.failed_in, self.died_alone)
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
                    (f.stage, f.number, f.rows, f.nbytes, hexed(f.live), f.checksum, f.partial)
                    for f in self.frames
                ],
                self.next_frame,
                self.recorded_progress,
                [(g.stage, g.token, g.worker, hexed(g.mask)) for g in self.grants],
                *(died if any(died) else ()),
            ]
        )

    @classmethod
    def restored(cls, run: str, run_number: int, stored: Json, now: float) -> tuple[Group, int]:
        """The inverse of `encode`, with the number of the batch (-1: none). The caller sets the grants' deadlines."""
        number, task_id, metadata, task_bytes, attempts, present, dead, position, batch, *rest = (
            stored
        )
        done, deliveries, writers, replacements, facts, frames, next_frame, *rest = rest
        recorded_progress, grants, *deaths = rest
        group = cls(
            run,
            run_number,
            number,
            task_id,
            len(attempts),
            TaskMetadata(*metadata),
            task_bytes,
            attempts,
            done=[int(mask, 16) for mask in done],
            held=[0] * len(done),
            deliveries=deliveries,
            writers=writers,
            facts=[fact and _restored_facts(fact) for fact in facts],
            replacements=replacements,
            present=int(present, 16),
            dead=int(dead, 16),
            frames=[
                StoredFrame(stage, own, tuple(rows), nbytes, int(live, 16), checksum, partial)
                for stage, own, rows, nbytes, live, checksum, partial in frames
            ],
            next_frame=next_frame,
            recorded_progress=recorded_progress,
            position=position,
            since=now,
        )
        if deaths:
            group.deaths, group.failed_in, group.died_alone = (*deaths, 0)[:3]
        for stage, token, worker, mask in grants:
            grant = Grant(group, stage, token, worker, int(mask, 16), now, now)
            group.grants.append(grant)
            group.held[stage] |= grant.mask
        return group, batch


def _restored_facts(stored: Json) -> RowFacts:
    outcome, num_tokens, oldest_epoch, oldest_step, newest_epoch, newest_step, reason, *more = (
        stored
    )
    return RowFacts(
        outcome=OUTCOMES[outcome],
        num_tokens=num_tokens,
        oldest=Version(oldest_epoch, oldest_step),
        newest=Version(newest_epoch, newest_step),
        finish_reason=reason,
        prompt_tokens=more[0] if more else 0,  # a store of before has none
    )


def count_sampled(counts: Counter[int], group: Group, sign: int) -> None:
    """Count the group (1), or stop counting it (-1), under the step from which it was sampled, if it was."""
    step = group.sampled_from
    if step is not None:
        counts[step] += sign
        if not counts[step]:
            del counts[step]
