"""The resident rows of a run: its groups, the sets in which their rows wait, the ledger; and every move of a row.

A move is synchronous: it happens between two awaits and notifies the calls that may go on. `Run.save` then stages the
changed records in the commit log.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Final

from meshrl.contract.errors import NotFoundError
from meshrl.contract.types import RowBlock, RunSpec, Uid
from meshrl.transferqueue import sampling
from meshrl.transferqueue.model.fair_share import FairShare, Holder
from meshrl.transferqueue.model.group import Counts, Grant, Group, StoredFrame, bits, count_sampled
from meshrl.transferqueue.model.records import (
    ADMITTED,
    AuditLog,
    Exit,
    RunLedger,
    RunRecord,
    State,
    TaskMetadata,
)
from meshrl.transferqueue.model.signals import Signal, Turns
from meshrl.transferqueue.model.stages import Stage, Stages
from meshrl.transferqueue.model.waiting import CompleteGroups, Expiry, ReadyRows
from meshrl.transferqueue.store import CommitLog, Table


class Rows:
    """The rows of one run and where each of them is. `Run` adds batches, dead letters and versions."""

    def __init__(
        self,
        spec: RunSpec,
        number: int,
        *,
        sampler: sampling.Sampler,
        commit_log: CommitLog,
        expiry: Expiry,
        clock: Callable[[], float],
    ) -> None:
        self.spec = spec
        """Its vocabulary may be filled in later; nothing else changes."""
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
        """By stage number: something changed that a lease of several rows may wait for."""
        self.turns: Final = tuple(Turns(partial(getattr, ready, "count")) for ready in self._ready)
        """By stage number: who wants any row looks in turn."""
        self.gate_signal: Final = Signal()
        """The versions, the epoch or the end of the feed changed: who may lease at all."""
        self.complete_signal: Final = Signal()
        self.admission_signal: Final = Signal()
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
        """Where one row is, for messages; `_counts` counts all rows of a group at once."""
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
        """Until the grant expires."""
        return grant.deadline - self._expiry.now()

    # --- signals

    def notify_stages(self) -> None:
        """Something changed that a lease of several rows may need; for any row, it would not be enough."""
        for signal in self.rows_signals:
            signal.notify()

    def notify_all(self) -> None:
        """Every call that waits for this run looks again."""
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
        """A new attempt at each of `indices` comes in, which replaces so many dead rows."""
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

    def grant(self, stage: Stage, worker: str, limit: int) -> list[Grant]:
        """At most `limit` ready rows are delivered to `worker` under a token that nobody has, one grant per group."""
        self.record.last_token += 1
        token, now = self.record.last_token, self.clock()
        deadline = self.lease_deadline()
        holder = self.fair_share.holder(worker, now) if stage.first else None
        grants: list[Grant] = []
        for group, mask in self._ready[stage.number].pop(limit, worker, now):
            grant = Grant(group, stage.number, token, worker, mask, now, deadline, holder)
            group.add_grant(grant)
            if group.sampled_from is None:
                self._sample_from(group, self.record.published.step)
            self._expiry.watch(grant)
            self._refresh(group)
            grants.append(grant)
        return grants

    def extend(self, grant: Grant, mask: int, deadline: float) -> None:
        """Move the deadline of the rows in `mask`; the other rows of the grant keep theirs. Nothing is stored."""
        rest = grant.group.split_grant(grant, mask)
        if rest is not None:
            self._expiry.watch(rest)
        grant.deadline = deadline
        grant.renewed = True

    def write(self, stage: Stage, group: Group, mask: int, block: RowBlock) -> list[Holder]:
        """`stage` has written the rows of `block`, whose set is `mask`. Returns the worker that held them."""
        number, now = stage.number, self.clock()
        self._store_frame(group, number, mask, block)
        holders: list[Holder] = []
        for grant in group.grants:
            if grant.holder is not None and grant.stage == number and grant.token == block.token:
                grant.holder.finished([row.num_tokens for row in block.facts], now - grant.since)
                holders.append(grant.holder)
        group.mark_written(number, block.indices, mask, block.token)
        self._drop_frames(group, group.drop_progress(number, mask))
        if block.facts:
            group.set_facts(block.indices, block.facts)
            self.open_tokens += sum([row.num_tokens for row in block.facts])
        group.since = now
        self._refresh(group)
        return holders

    def append(self, stage: Stage, group: Group, mask: int, block: RowBlock) -> None:
        """`stage` has made progress on the rows of `block`, whose set is `mask`."""
        self._store_frame(group, stage.number, mask, block, partial=True)
        lengths = next(iter(block.frame.columns.values())).lengths or ()
        ends = [start + length for start, length in zip(block.starts, lengths, strict=True)]
        group.set_progress(block.indices, ends)

    def return_rows(
        self, stage: Stage, group: Group, mask: int, *, undelivered: bool = False
    ) -> None:
        """The rows in `mask` are no longer granted for `stage`; `undelivered` ones had no attempt."""
        group.let_go(stage.number, mask)
        if undelivered:
            group.undo_delivery(stage.number, mask)
        group.since = self.clock()
        self._refresh(group)

    def count_expiry(self, stage: Stage, grant: Grant, *, delivered: bool) -> None:
        """The lease on a grant expired; rows that were not `delivered` do not count as an attempt."""
        self._lease_expiries[stage.name] += grant.mask.bit_count()
        grant.group.lost_by.update(dict.fromkeys(bits(grant.mask), grant.worker))
        if not delivered:
            grant.group.undo_delivery(grant.stage, grant.mask)

    def undo(self, stages: set[int], group: Group, mask: int) -> None:
        """The rows in `mask` of a group that is in no batch go back to before `stages`."""
        self.withdraw(group)
        self._drop_frames(group, group.undo_stages(stages, mask))
        group.since = self.clock()
        self._refresh(group)

    # --- groups become complete

    def offer(self, group: Group) -> None:
        """The group is complete and can be taken."""
        self.complete.add(group)
        self.complete_signal.notify()

    def withdraw(self, group: Group) -> None:
        """The group cannot be taken (any more)."""
        self.complete.discard(group)

    # --- rows leave

    def remove_rows(self, group: Group, mask: int, exit_: Exit, reason: str) -> None:
        """Rows of the group leave; their payload is deleted, and a worker that holds one is fenced."""
        count = mask.bit_count()
        self.ledger.leave(count, exit_, reason)
        self.audit_log.note(group.task_id, count, exit_, reason)
        if not (group.batch and group.batch.consumed):
            self.open_tokens -= sum([facts.num_tokens for facts in group.facts_of(mask)])
        self._drop_frames(group, group.drop_rows(mask))
        self._refresh(group)

    def reissue(self, group: Group, reason: str) -> None:
        """Every row leaves as stale, and a new attempt at each comes in, in the group's old place."""
        self.withdraw(group)
        self.remove_rows(group, group.present, Exit.STALE, reason)
        self._sample_from(group, None)
        group.position = -1
        self.start_attempts(group, range(group.size))

    def mark_dead(self, group: Group, index: int) -> None:
        """The row at `index` was dead-lettered and is not replaced."""
        group.dead |= 1 << index

    # --- bookkeeping

    def _store_frame(
        self, group: Group, stage: int, mask: int, block: RowBlock, *, partial: bool = False
    ) -> None:
        frame = block.frame.value
        key = group.add_frame(stage, block.indices, mask, frame, partial=partial)
        self._commit_log.put(Table.PAYLOAD, key, frame)
        self.open_bytes += len(frame)

    def _drop_frames(self, group: Group, frames: Iterable[StoredFrame]) -> None:
        for frame in frames:
            self._commit_log.delete(Table.PAYLOAD, group.frame_key(frame.number))
            if not (group.batch and group.batch.consumed):
                self.open_bytes -= frame.nbytes

    def _sample_from(self, group: Group, step: int | None) -> None:
        """The group, which is in no batch and not complete, is sampled from a version of `step` on."""
        self._count_sampled(group, -1)
        group.sampled_from = step
        self._count_sampled(group, 1)

    def _count_sampled(self, group: Group, sign: int) -> None:
        """The group is in no batch (1), or it is not here any more, or in one (-1)."""
        count_sampled(self.sampled_from, group, sign)

    def _count_open(self, group: Group, sign: int) -> None:
        """The group's bytes and tokens count for admission (1) or do not any more (-1)."""
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
