"""The resident rows of a run: its groups, the sets in which their rows wait, the ledger; and every move of a row.

A move is synchronous: it happens between two awaits and notifies calls that may continue. `Run.save` then stages the
changed records in the commit log.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from meshrl.contract.errors import NotFoundError, UserError
from meshrl.contract.frames import checksum_of
from meshrl.contract.types import NOTES, RowBlock, RunSpec, StageSpec, Uid
from meshrl.transferqueue import sampling
from meshrl.transferqueue.model.failures import LastFailure, LastingFaults
from meshrl.transferqueue.model.fair_share import FairShare, Holder
from meshrl.transferqueue.model.group import Counts, Grant, Group, StoredFrame, count_sampled
from meshrl.transferqueue.model.records import (
    ADMITTED,
    AuditLog,
    DeadLetters,
    DeadRow,
    Exit,
    KnownTasks,
    RunLedger,
    RunRecord,
    State,
    TakenBatch,
    TaskMetadata,
)
from meshrl.transferqueue.model.specs import Quota
from meshrl.transferqueue.model.waiting import CompleteGroups, Expiry, ReadyRows
from meshrl.transferqueue.signals import Signal, Turns
from meshrl.transferqueue.store import CommitLog, Durations, Table, encode_record


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage; `number` is its index in every list that has an entry per stage."""

    number: int
    name: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    after: tuple[int, ...]
    """Numbers of the stages that write what this one reads."""
    first: bool
    """Whether it reads no column: it samples, so it follows the policy's version."""


class Stages:
    """All stages of a run; the constructor checks them.

    Raises:
        UserError: names the stage and the column that are wrong.
    """

    def __init__(self, specs: Sequence[StageSpec]) -> None:
        self._of_column: dict[str, int] = {}
        for number, spec in enumerate(specs):
            for column in spec.writes:
                if column in self._of_column:
                    other = specs[self._of_column[column]].name
                    raise UserError(f"column {column} is written by {other} and by {spec.name}")
                self._of_column[column] = number
        for number, spec in enumerate(specs):
            for column in NOTES.get(spec.name, ()):
                self._of_column.setdefault(column, number)
        self._by_name: dict[str, Stage] = {}
        for number, spec in enumerate(specs):
            self._check(spec, number)
            after = tuple(sorted({self._of_column[column] for column in spec.reads}))
            self._by_name[spec.name] = Stage(
                number, spec.name, spec.reads, spec.writes, after, first=not spec.reads
            )
        self.ordered = tuple(self._by_name.values())
        """The stages by number."""
        self.writes = tuple(stage.writes for stage in self.ordered)
        """The columns that each stage writes, by stage number."""
        if not any(stage.first for stage in self.ordered):
            raise UserError("a run needs a stage that reads nothing: the one that samples")

    def _check(self, spec: StageSpec, number: int) -> None:
        if spec.name in self._by_name:
            raise UserError(f"two stages are named {spec.name}")
        if not spec.writes:
            raise UserError(f"stage {spec.name} writes no column")
        for column in spec.reads:
            writer = self._of_column.get(column)
            if writer is None or writer >= number:
                raise UserError(
                    f"stage {spec.name} reads {column}, which no earlier stage writes"
                    f" (written before it: {', '.join(self._written_before(number)) or 'nothing'})"
                )

    def _written_before(self, number: int) -> list[str]:
        return [column for column, writer in self._of_column.items() if writer < number]

    def get(self, name: str) -> Stage | None:
        """The stage with this name, if the run has it."""
        return self._by_name.get(name)

    def __getitem__(self, name: str) -> Stage:
        stage = self._by_name.get(name)
        if stage is None:
            raise UserError(f"no stage named {name!r} (the run has {', '.join(self._by_name)})")
        return stage

    def depending_on(self, stage: Stage) -> set[int]:
        """Numbers of `stage` and of all stages that read what it writes, directly or not."""
        numbers = {stage.number}
        for other in self.ordered[stage.number + 1 :]:
            if numbers & set(other.after):
                numbers.add(other.number)
        return numbers

    def of_columns(self, columns: Sequence[str]) -> list[Stage]:
        """The stages that write `columns`, each once.

        Raises:
            UserError: no stage of the run writes one of the columns.
        """
        for column in columns:
            if column not in self._of_column:
                raise UserError(
                    f"no stage of the run writes column {column!r}"
                    f" (columns: {', '.join(self._of_column)})"
                )
        return [self.ordered[n] for n in sorted({self._of_column[name] for name in columns})]


class ResidentRows:
    """A run's state in RAM, the sets of its waiting rows, and the transitions that several verbs share."""

    def __init__(
        self,
        spec: RunSpec,
        number: int,
        *,
        sampler: sampling.Sampler,
        commit_log: CommitLog,
        expiry: Expiry,
        clock: Callable[[], float],
        quota: Quota | None = None,
    ) -> None:
        self.spec = spec
        """Its vocabulary may be filled in later; nothing else changes."""
        self.admission_groups: Final = spec.admission_groups
        self.name: Final = spec.run
        self.number: Final = number
        self.stages: Final = Stages(spec.stages)
        self.clock: Final = clock
        """Monotonic seconds."""
        self._commit_log = commit_log
        self._expiry = expiry

        self.record = RunRecord()
        self._groups: dict[int, Group] = {}
        self.groups: Final[Mapping[int, Group]] = self._groups
        """The resident groups by number."""
        self._by_task: dict[str, Group] = {}
        self.by_task: Final[Mapping[str, Group]] = self._by_task
        """The resident groups by task id."""
        self.ledger = RunLedger()
        """Counts every row that was ever admitted."""
        self.audit_log: Final = AuditLog(number)
        self.complete: Final = CompleteGroups(sampler)
        """Groups that can be taken now."""
        self.fair_share: Final = FairShare()
        """The workers of the stage that samples."""
        self._ready = tuple(ReadyRows() for _ in self.stages.ordered)
        self.open_bytes = 0
        """Payload of the groups that are not consumed."""
        self.sampled_from: Final[Counter[int]] = Counter()
        """The groups that are in no batch, by the step from which they were sampled."""
        self.open_tokens = 0
        """Tokens of the rows of these groups, as far as they are sampled."""
        self._lease_expiries: Counter[str] = Counter()
        self.lease_expiries: Final[Mapping[str, int]] = self._lease_expiries
        """Rows whose lease expired since the queue opened, by stage; 0 for any other name."""

        self.rows_signals: Final = tuple(Signal() for _ in self.stages.ordered)
        """One per stage: something changed that a lease of several rows may wait for."""
        self.turns: Final = tuple(Turns(partial(getattr, ready, "count")) for ready in self._ready)
        """One per stage: the order in which waiting leases of any row look for one."""
        self.gate_signal: Final = Signal()
        """The versions, the epoch or the end of the feed changed: who may lease at all."""
        self.complete_signal: Final = Signal()
        self.admission_signal: Final = Signal()
        self._quota = quota or Quota()
        self.key: Final = b"s" + number.to_bytes(4, "big")
        """The key of the record that every transition rewrites."""
        self.spec_key: Final = b"r" + number.to_bytes(4, "big")
        """The key of the spec's record, which changes once at most: when the vocabulary is first known."""
        self._batches: dict[str, TakenBatch] = {}
        self.batches: Final[Mapping[str, TakenBatch]] = self._batches
        """The batches that are taken or settled, by id."""
        self._dead = DeadLetters()
        self.dead_letters: Final[Mapping[Uid, DeadRow]] = self._dead.by_uid
        """The dead rows, in the order in which they died."""
        self.known_tasks: Final = KnownTasks(number, commit_log)
        self.in_batches = 0
        """Groups in a batch, taken or settled."""
        self._consumed = 0
        self._waited_for = ""
        """The id of the batch that a trainer asked for last."""
        self._dead_before: int | None = None
        """Rows that had died when it asked for it a second time; None: it has not."""
        self._settled = 0
        """Batches that were settled since the queue opened."""
        self.publishes = 0
        """Calls of `publish` since the queue opened: shows a waiting lease that its version may be too old."""
        self.lasting_faults: Final = LastingFaults()
        self._failures: dict[str, LastFailure] = {}
        self.failures: Final[Mapping[str, LastFailure]] = self._failures
        """The last failure of each stage since the queue opened."""
        self.ready_to_taken: Final = Durations()
        """Per row since the queue opened: from the last column of its group to the batch that takes it."""

        self._ready_by_stage = tuple(
            zip(self.stages.ordered, self._ready, self.rows_signals, self.turns, strict=True)
        )

    # --- what others may read

    def num_ready(self, stage: Stage) -> int:
        """Rows that `stage` could lease now."""
        return self._ready[stage.number].count

    def find(self, uid: Uid) -> Group | None:
        """The group of a resident row, of exactly this attempt."""
        group = self._by_task.get(uid.task)
        return group if group is not None and group.has(uid.index, uid.attempt) else None

    def resident(self, rows: RowBlock) -> tuple[Group, int]:
        """The group of rows that are all resident, and the rows' mask. Raises NotFoundError, with `uid`."""
        group = self._by_task.get(rows.task)
        if group is not None and ((mask := group.mask_of(rows)) or not rows.indices):
            return group, mask
        for uid in rows.uids(self.name):
            if group is None or not group.has(uid.index, uid.attempt):
                raise NotFoundError(f"no row {uid} in run {self.name}", uid=uid)
        raise NotFoundError(f"no rows of task {rows.task} in run {self.name}", task=rows.task)

    def state_of(self, group: Group, index: int) -> State:
        """The state of one row, for messages; `_counts` counts all rows of a group at once."""
        if group.batch is not None:
            return State.SETTLED if group.batch.settled else State.TAKEN
        if group.finished >> index & 1:
            return State.READY
        if any(done >> index & 1 for done in group.done):
            return State.PENDING
        return State.LEASED if any(held >> index & 1 for held in group.held) else State.QUEUED

    def lease_deadline(self) -> float:
        """When a lease that is granted or renewed now expires, on the clock of the leases."""
        return self._expiry.now() + self.spec.lease_ttl_s

    def seconds_left(self, grant: Grant) -> float:
        """Seconds until the grant expires."""
        return grant.deadline - self._expiry.now()

    # --- records

    def encode(self) -> bytes:
        """State and ledger: they change in the transaction of the rows."""
        return encode_record({**self.record.encode(), "books": self.ledger.totals()})

    def save(self, groups: Iterable[Group] = ()) -> None:
        """Stage the run's record and those of the `groups` that are still resident."""
        self.audit_log.stage(self._commit_log)
        self._commit_log.touch(self)
        for group in groups:
            if self._groups.get(group.number) is group:
                self._commit_log.touch(group)

    # --- signals

    def notify_stages(self) -> None:
        """Something changed that a lease of several rows may need; for any row, it would not be enough."""
        for signal in self.rows_signals:
            signal.notify()

    def notify_all(self) -> None:
        """Wake every call that waits for this run."""
        self.notify_stages()
        self.gate_signal.notify()
        self.complete_signal.notify()
        self.admission_signal.notify()

    def notify_shares(self, stage: Stage, holders: Iterable[Holder]) -> None:
        """`holders` hold fewer rows than before: they may have others now.

        The shares of the others change little. One of them looks, so that all do in time. A worker that holds none
        any more looks, too, and waits at the head of the line from then on.
        """
        if not stage.first:
            return
        some_ready = self._ready[stage.number].count > 0
        for holder in holders:
            if some_ready or not holder.rows:
                holder.wrote.notify()
        if some_ready:
            self.turns[stage.number].notify_one()

    # --- rows come in

    def start_attempts(
        self, group: Group, indices: Sequence[int], *, replacements: int = 0
    ) -> None:
        """Start a new attempt at each of `indices`, in place of dead rows."""
        now = self.clock()
        for index in indices:
            group.attempts[index] += 1
            group.add_row(index, now, replacements=replacements)
        self._came_in(group, len(indices))

    def _add_group(
        self, number: int, task_id: str, metadata: TaskMetadata, nbytes: int, attempts: list[int]
    ) -> Group:
        """A group comes in, with a row at every index."""
        group = Group.fresh(
            self.name,
            self.number,
            number,
            task_id,
            metadata=metadata,
            task_bytes=nbytes,
            attempts=attempts,
            stages=len(self._ready),
            now=self.clock(),
        )
        self._groups[number] = group
        self._by_task[task_id] = group
        self.open_bytes += nbytes
        self._came_in(group, group.size)
        return group

    def _came_in(self, group: Group, rows: int) -> None:
        self.ledger.admitted += rows
        self.audit_log.note(group.task_id, rows, ADMITTED)
        self._refresh(group)

    # --- rows change hands

    def return_rows(
        self, stage: Stage, group: Group, mask: int, *, undelivered: bool = False
    ) -> None:
        """Return the rows in `mask` from `stage`; `undelivered` ones had no attempt."""
        group.let_go(stage.number, mask)
        if undelivered:
            group.undo_delivery(stage.number, mask)
        group.since = self.clock()
        self._refresh(group)

    # --- groups become complete

    def offer(self, group: Group) -> None:
        """Offer the complete group: it can be taken."""
        self.complete.add(group)
        self.complete_signal.notify()

    # --- rows leave

    def remove_rows(self, group: Group, mask: int, exit_: Exit, reason: str) -> None:
        """Remove rows of the group; their payload is deleted, and a worker that holds one is fenced."""
        count = mask.bit_count()
        self.ledger.leave(count, exit_, reason)
        self.audit_log.note(group.task_id, count, exit_, reason)
        if not (group.batch and group.batch.consumed):
            self.open_tokens -= sum([facts.num_tokens for facts in group.facts_of(mask)])
        self._drop_frames(group, group.drop_rows(mask))
        self._refresh(group)

    # --- bookkeeping

    def _store_frame(
        self, group: Group, stage: int, mask: int, block: RowBlock, *, partial: bool = False
    ) -> None:
        """Store columns of the rows of `block`, whose set is `mask`."""
        frame, number = block.frame.value, group.next_frame
        group.next_frame += 1
        group.frames.append(
            StoredFrame(stage, number, block.indices, len(frame), mask, checksum_of(frame), partial)
        )
        self._commit_log.put(Table.PAYLOAD, group.frame_key(number), frame)
        self.open_bytes += len(frame)

    def _drop_frames(self, group: Group, frames: Iterable[StoredFrame]) -> None:
        for frame in frames:
            self._commit_log.delete(Table.PAYLOAD, group.frame_key(frame.number))
            if not (group.batch and group.batch.consumed):
                self.open_bytes -= frame.nbytes

    def _sample_from(self, group: Group, step: int | None) -> None:
        """Sample the group, which is in no batch and not complete, from a version of `step` on."""
        count_sampled(self.sampled_from, group, -1)
        group.sampled_from = step
        count_sampled(self.sampled_from, group, 1)

    def _count_open(self, group: Group, sign: int) -> None:
        """Count the group's bytes and tokens for admission (1), or stop counting them (-1)."""
        self.open_bytes += sign * group.nbytes
        self.open_tokens += sign * group.num_tokens

    def _refresh(self, group: Group) -> None:
        """Bring the ledger and the ready sets in line with the group."""
        counts = self._counts(group)
        if counts != group.counts:
            self.ledger.move(group.counts, counts)
            group.counts = counts
        if group.batch is not None:
            return  # its rows have every column, so they have left the ready sets
        for stage, ready, signal, turns in self._ready_by_stage:
            if ready.set(group, group.leasable(stage.number, stage.after)):
                signal.notify()
                turns.notify()

    def _counts(self, group: Group) -> Counts:
        """The group's rows by state, in the order of State."""
        present, batch = group.present, group.batch
        total = present.bit_count()
        if batch is not None:
            return (0, 0, 0, 0, 0, total) if batch.settled else (0, 0, 0, 0, total, 0)
        some = held = 0
        every = present
        for done, granted in zip(group.done, group.held, strict=True):
            some |= done
            every &= done
            held |= granted
        ready = every.bit_count()
        pending = (some & present).bit_count() - ready
        leased = (held & ~some).bit_count()
        return (total - ready - pending - leased, leased, pending, ready, 0, 0)
