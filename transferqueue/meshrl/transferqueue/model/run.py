"""One run in RAM: its groups, the sets they are ready in, its books; and the primitive moves of rows.

Everything here is synchronous: a transition happens between two awaits, stages its records in the journal and rings
the signals of whoever may go on. The verbs (lease, write, take, settle …) are in leases.py and batches.py.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence

from meshrl.contract.errors import FencedError, NotFoundError
from meshrl.contract.frames import checksum_of
from meshrl.contract.types import Json, RunSpec, RunState, Siblings, Uid, Version
from meshrl.transferqueue import sampling
from meshrl.transferqueue.commit_log import CommitLog
from meshrl.transferqueue.model.audit_log import ADMITTED, AuditLog
from meshrl.transferqueue.model.durations import Durations
from meshrl.transferqueue.model.fair_share import FairShare
from meshrl.transferqueue.model.group import Counts, Group, StoredFrame, TaskMetadata
from meshrl.transferqueue.model.ledger import Exit, RunLedger, State
from meshrl.transferqueue.model.ordered import OrderedNumbers
from meshrl.transferqueue.model.ready import ReadyRows
from meshrl.transferqueue.model.stages import Stages
from meshrl.transferqueue.model.waiting import Expiry, Signal
from meshrl.transferqueue.operations.batches import TakenBatch
from meshrl.transferqueue.operations.dead_letters import DeadRow
from meshrl.transferqueue.records import encode_record
from meshrl.transferqueue.store import Table


class Run:
    """The state of one run."""

    def __init__(
        self,
        spec: RunSpec,
        number: int,
        *,
        commit_log: CommitLog,
        expiry: Expiry,
        clock: Callable[[], float],
    ) -> None:
        self.spec = spec
        self.name = spec.run
        self.number = number
        self.stages = Stages(spec.stages)
        self.commit_log = commit_log
        self.expiry = expiry
        self.clock = clock

        self.epoch = 0
        self.owner = ""
        self.published = Version(0, 0)
        self.cursor = ""
        self.feed_closed = False
        self.committed_step = 0
        self.last_token = 0
        self.next_group = 0
        self.next_position = 0
        self.next_batch = 0
        self.next_dead = 0

        self.groups: dict[int, Group] = {}
        self.by_task: dict[str, Group] = {}
        self.seen: dict[str, int] = {}
        """Tasks that were admitted, with their group's number: a feeder that repeats itself changes nothing."""
        self.departed: deque[str] = deque()
        """Those of `seen` that left, in that order; the oldest are forgotten (see admission.py)."""
        self.batches: dict[str, TakenBatch] = {}
        self.dead: dict[Uid, DeadRow] = {}
        self.dead_of: dict[int, list[DeadRow]] = {}
        """Dead letters by group number: they keep the task of a group that left."""
        self.ledger = RunLedger()
        self.audit_log = AuditLog(number)

        self.ready = tuple(ReadyRows() for _ in self.stages)
        self.fair_share = FairShare()
        """Of the workers that sample."""
        self.sampler = sampling.build(spec.sampler)
        self.replay = OrderedNumbers()
        """Complete groups that were taken before, by position: to be taken again first, and in that order."""
        self.complete = 0
        """Groups that could be taken now."""
        self.in_batches = 0
        """Groups in a batch, taken or settled."""
        self.consumed = 0
        """Groups whose batch gives no credit back any more: see admission.py."""
        self.open_bytes = 0
        """Payload of the groups that are not consumed."""
        self.open_tokens = 0
        """Tokens of their rows, as far as these are sampled."""

        self.lease_expiries: Counter[str] = Counter()
        """Rows whose holder fell silent, by stage; since the queue opened, like `ready_to_taken`."""
        self.ready_to_taken = Durations()
        """Per row: from the last column of its group to the batch that takes it."""
        self.publishes = 0
        """Calls of `publish` since the queue opened: tells a waiting lease that its engine's version is old news."""
        self.rows_signals = tuple(Signal() for _ in self.stages)
        self._ready_by_stage = tuple(zip(self.stages, self.ready, self.rows_signals, strict=True))
        self.complete_signal = Signal()
        self.admission_signal = Signal()

    # --- what is stored of the run itself

    @property
    def key(self) -> bytes:
        """Of the record that every transition rewrites."""
        return b"s" + self.number.to_bytes(4, "big")

    @property
    def spec_key(self) -> bytes:
        """Of the record that never changes."""
        return b"r" + self.number.to_bytes(4, "big")

    def encode(self) -> bytes:
        """Counters and position, with the books: they change in the transaction of the rows."""
        return encode_record(
            {
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
                "books": self.ledger.totals(),
            }
        )

    def decode(self, stored: Json) -> None:
        """The inverse of `encode`."""
        fields = dict(stored)
        self.ledger = RunLedger.restored(fields.pop("books"))
        self.published = Version.parse(fields.pop("published"))
        for name, value in fields.items():
            setattr(self, name, value)

    def state(self) -> RunState:
        """What the port tells of the run."""
        return RunState(
            spec=self.spec,
            epoch=self.epoch,
            published=self.published,
            cursor=self.cursor,
            feed_closed=self.feed_closed,
            committed_step=self.committed_step,
        )

    def save(self, groups: Iterable[Group] = ()) -> None:
        """Stage the run's record and those of `groups` that are still here."""
        self.commit_log.touch(self)
        self.audit_log.stage(self.commit_log)
        for group in groups:
            if self.groups.get(group.number) is group:
                self.commit_log.touch(group)

    def check_epoch(self, epoch: int) -> None:
        """Refuse a trainer that lost the run. Raises FencedError."""
        if epoch != self.epoch:
            raise FencedError(
                f"run {self.name}: epoch {epoch} is fenced, epoch {self.epoch} has the run"
                f" ({self.owner or 'nobody acquired it'})",
                epoch=epoch,
                newest=self.epoch,
            )

    # --- signals

    def notify_stages(self) -> None:
        """Something changed that every lease may wait for."""
        for signal in self.rows_signals:
            signal.notify()

    def notify_all(self) -> None:
        """Everybody looks again."""
        self.notify_stages()
        self.complete_signal.notify()
        self.admission_signal.notify()

    # --- rows come, change hands and go

    def find(self, uid: Uid) -> Group | None:
        """The group of a resident row, of exactly this attempt."""
        group = self.by_task.get(uid.task)
        return group if group is not None and group.has(uid.index, uid.attempt) else None

    def resident(self, rows: Siblings) -> tuple[Group, int]:
        """The group of rows that are all here, and the rows' mask. Raises NotFoundError, with `uid`."""
        group = self.by_task.get(rows.task)
        if group is not None and ((mask := group.mask_of(rows)) or not rows.indices):
            return group, mask
        for uid in rows.uids(self.name):
            if group is None or not group.has(uid.index, uid.attempt):
                raise NotFoundError(f"no row {uid} in run {self.name}", uid=uid)
        raise NotFoundError(f"no rows of task {rows.task} in run {self.name}", task=rows.task)

    def open_load(self, groups: Iterable[Group], sign: int = 1) -> None:
        """Groups are not consumed (any more, or with -1: are): their bytes and tokens count for admission."""
        for group in groups:
            self.open_bytes += sign * group.nbytes
            self.open_tokens += sign * group.num_tokens

    def new_group(
        self,
        number: int,
        task_id: str,
        *,
        metadata: TaskMetadata,
        task_bytes: int,
        attempts: list[int],
    ) -> Group:
        """A group without rows, of this run."""
        return Group.fresh(
            *(self.name, self.number, number, task_id),
            metadata=metadata,
            task_bytes=task_bytes,
            attempts=attempts,
            stages=len(self.stages),
        )

    def add_group(self, group: Group) -> None:
        """A `new_group` comes in (or comes in again), with a fresh row at every index."""
        self.groups[group.number] = group
        self.by_task[group.task_id] = group
        self.open_bytes += group.task_bytes
        group.present = (1 << group.size) - 1
        group.since = self.clock()
        self._came_in(group, group.size)

    def add_rows(self, group: Group, indices: Sequence[int]) -> None:
        """The attempts of `group.attempts` at `indices` come in, in the place of earlier ones."""
        now = self.clock()
        for index in indices:
            group.add_row(index, now)
        self._came_in(group, len(indices))

    def _came_in(self, group: Group, rows: int) -> None:
        self.ledger.admitted += rows
        self.audit_log.note(group.task_id, rows, ADMITTED)
        self.refresh(group)

    def counts(self, group: Group) -> Counts:
        """The group's rows by state: queued, leased, pending, ready, taken, settled."""
        present, batch = group.present, group.batch
        here = present.bit_count()
        if batch is not None:
            return (0, 0, 0, 0, 0, here) if batch.settled else (0, 0, 0, 0, here, 0)
        some = held = 0
        every = present
        for done, granted in zip(group.done, group.held, strict=True):
            some |= done
            every &= done
            held |= granted
        ready = every.bit_count()
        pending = (some & present).bit_count() - ready
        leased = (held & ~some).bit_count()
        return (here - ready - pending - leased, leased, pending, ready, 0, 0)

    def state_of(self, group: Group, index: int) -> State:
        """Where one row is; for people. `counts` says the same of all rows at once."""
        if group.batch is not None:
            return State.SETTLED if group.batch.settled else State.TAKEN
        if group.finished >> index & 1:
            return State.READY
        if any(done >> index & 1 for done in group.done):
            return State.PENDING
        return State.LEASED if any(held >> index & 1 for held in group.held) else State.QUEUED

    def refresh(self, group: Group) -> None:
        """Bring the books and the ready sets in line with the group."""
        counts = self.counts(group)
        if counts != group.counts:
            self.ledger.move(group.counts, counts)
            group.counts = counts
        if group.batch is not None:
            return  # its rows have every column, so they have left the ready sets
        for stage, ready, signal in self._ready_by_stage:
            if ready.set(group, group.leasable(stage.number, stage.after)):
                signal.notify()

    def remove_rows(self, group: Group, mask: int, exit_: Exit, reason: str) -> None:
        """Rows of the group leave; their payload goes, whoever holds one is fenced."""
        self.ledger.leave(mask.bit_count(), exit_, reason)
        self.audit_log.note(group.task_id, mask.bit_count(), exit_, reason)
        if not (group.batch and group.batch.consumed):
            self.open_tokens -= sum([facts.num_tokens for facts in group.facts_of(mask)])
        self.drop_frames(group, group.drop_rows(mask))
        self.refresh(group)

    def keep_frame(
        self,
        group: Group,
        stage: int,
        rows: tuple[int, ...],
        mask: int,
        frame: bytes,
        *,
        partial: bool = False,
    ) -> None:
        """Columns that `stage` made of `rows` (indices in the frame's order; `mask` is their set) are stored."""
        number = group.next_frame
        group.next_frame += 1
        group.frames.append(
            StoredFrame(
                *(stage, number, rows, len(frame), mask), seal=checksum_of(frame), partial=partial
            )
        )
        self.commit_log.put(Table.PAYLOAD, group.frame_key(number), frame)
        self.open_bytes += len(frame)

    def drop_frames(self, group: Group, frames: Iterable[StoredFrame]) -> None:
        """Frames that the group has no use for any more are not stored any more."""
        for frame in frames:
            self.commit_log.delete(Table.PAYLOAD, group.frame_key(frame.number))
            if not (group.batch and group.batch.consumed):
                self.open_bytes -= frame.nbytes

    def remove_group(self, group: Group, exit_: Exit, reason: str) -> None:
        """Every row that is left leaves, and the group with them."""
        if group.present:
            self.remove_rows(group, group.present, exit_, reason)
        self.withdraw(group)
        batch = group.batch
        if batch is not None:
            del batch.groups[group.number]
            self.in_batches -= 1
        if batch is not None and batch.consumed:
            self.consumed -= 1
        else:
            self.open_bytes -= group.task_bytes
        del self.groups[group.number]
        del self.by_task[group.task_id]
        self.commit_log.delete(Table.META, group.key)
        dead = self.dead_of.get(group.number, [])
        for letter in dead:
            letter.attempts = list(group.attempts)
            self.commit_log.touch(letter)
        if not dead:
            self.commit_log.delete(Table.PAYLOAD, group.task_key)
            self.departed.append(group.task_id)
        self.notify_all()

    # --- completeness

    def offer(self, group: Group) -> None:
        """The group is complete: to be taken, where its place is."""
        group.complete = True
        self.complete += 1
        if group.position >= 0:
            self.replay.add(group.number, (group.position,))
        else:
            facts = group.facts_of(group.finished)
            _, num_tokens, oldest, newest, _ = zip(*facts, strict=True)
            self.sampler.add(
                sampling.CompleteGroup(
                    number=group.number,
                    task_id=group.task_id,
                    priority=group.metadata.priority,
                    data_source=group.metadata.data_source,
                    difficulty=group.metadata.difficulty,
                    num_tokens=num_tokens,
                    oldest=min(oldest),
                    newest=max(newest),
                )
            )
        self.complete_signal.notify()

    def withdraw(self, group: Group) -> None:
        """The group is not to be taken (any more)."""
        if group.complete:
            group.complete = False
            self.complete -= 1
            self.sampler.discard(group.number)
            self.replay.discard(group.number)
