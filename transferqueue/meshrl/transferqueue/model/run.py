"""One run in RAM: its resident rows, its versions, the batches that a trainer took, its dead letters.

The attributes of a run change by its methods alone; `operations/` decides which of them to call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from meshrl.contract.errors import FencedError
from meshrl.contract.frames import with_checksum
from meshrl.contract.types import DeadLetter, Json, Outcome, RunSpec, RunState, Uid, Version
from meshrl.transferqueue.model.group import Group, task_key
from meshrl.transferqueue.model.records import (
    DeadLetters,
    DeadRow,
    Exit,
    KnownTasks,
    RunLedger,
    RunRecord,
    TakenBatch,
    TaskMetadata,
)
from meshrl.transferqueue.model.rows import Rows
from meshrl.transferqueue.model.specs import Quota, encode_spec
from meshrl.transferqueue.model.stages import Stage
from meshrl.transferqueue.model.waiting import Expiry
from meshrl.transferqueue.sampling import Sampler
from meshrl.transferqueue.store import CommitLog, Durations, Record, Table, encode_record


@dataclass(frozen=True, slots=True, kw_only=True)
class LastFailure:
    """What a stage's workers could not do."""

    count: int
    first: float
    last: float
    """Of the run's clock."""
    uid: Uid
    """Of the last one."""
    reason: str


class Run(Rows):
    """The state of one run."""

    def __init__(
        self,
        spec: RunSpec,
        number: int,
        *,
        sampler: Sampler,
        commit_log: CommitLog,
        expiry: Expiry,
        clock: Callable[[], float],
        quota: Quota | None = None,
    ) -> None:
        super().__init__(
            spec, number, sampler=sampler, commit_log=commit_log, expiry=expiry, clock=clock
        )
        self._quota = quota or Quota()
        self.key: Final = b"s" + number.to_bytes(4, "big")
        """The key of the record that every transition rewrites."""
        self.spec_key: Final = b"r" + number.to_bytes(4, "big")
        """The key of the spec's record, which changes once at most: when somebody first knows the vocabulary."""
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
        self.publishes = 0
        """Calls of `publish` since the queue opened: shows a waiting lease that its version may be too old."""
        self._failures: dict[str, LastFailure] = {}
        self.failures: Final[Mapping[str, LastFailure]] = self._failures
        """By stage, since the queue opened."""
        self.ready_to_taken: Final = Durations()
        """Per row since the queue opened: from the last column of its group to the batch that takes it."""

    # --- what others may read

    @property
    def unconsumed(self) -> int:
        """Groups that are admitted and not consumed: they hold admission credit (see operations/lifecycle.py)."""
        return len(self._groups) - self._consumed

    def groups_of(self, batch: TakenBatch) -> list[Group]:
        """The groups of a batch of this run."""
        return [self._groups[number] for number in batch.groups]

    def check_epoch(self, epoch: int) -> None:
        """Refuse a trainer that lost the run. Raises FencedError."""
        if epoch != self.record.epoch:
            raise FencedError(
                f"run {self.name}: epoch {epoch} is fenced, epoch {self.record.epoch} has the run"
                f" ({self.record.owner or 'nobody acquired it'})",
                epoch=epoch,
                newest=self.record.epoch,
            )

    # --- records

    def encode(self) -> bytes:
        """State and ledger: they change in the transaction of the rows."""
        return encode_record({**self.record.encode(), "books": self.ledger.totals()})

    def decode(self, stored: Json) -> None:
        """The inverse of `encode`."""
        fields = dict(stored)
        self.ledger = RunLedger.restored(fields.pop("books"))
        self.record = RunRecord.decode(fields)

    def state(self) -> RunState:
        """The run's state as the port returns it."""
        return RunState(
            spec=self.spec,
            epoch=self.record.epoch,
            published=self.record.published,
            cursor=self.record.cursor,
            feed_closed=self.record.feed_closed,
            committed_step=self.record.committed_step,
        )

    def save(self, groups: Iterable[Group] = ()) -> None:
        """Stage the run's record and those of the `groups` that are still resident."""
        self._commit_log.touch(self)
        self.audit_log.stage(self._commit_log)
        for group in groups:
            if self._groups.get(group.number) is group:
                self._commit_log.touch(group)

    def record_keys(self) -> Iterator[bytes]:
        """The keys of all records of the run."""
        yield self.spec_key
        yield self.key
        yield from self.known_tasks.keys()
        yield from self.audit_log.keys()
        records: Iterable[Record] = (
            *self._groups.values(),
            *self._batches.values(),
            *self._dead.by_uid.values(),
        )
        for record in records:
            yield record.key

    def needed_payload(self) -> dict[bytes, str]:
        """The payload that the run's records refer to: key to a description."""
        needed: dict[bytes, str] = {}
        for group in self._groups.values():
            needed[group.task_key] = f"task {self.name}/{group.task_id}"
            for frame in group.frames:
                stage = self.spec.stages[frame.stage].name
                needed[group.frame_key(frame.number)] = (
                    f"columns of {self.name}/{group.task_id}, {stage}"
                )
        for dead in self._dead.by_uid.values():
            needed[task_key(self.number, dead.group)] = f"task of dead letter {dead.letter.uid}"
        for batch in self._batches.values():
            needed[batch.manifest_key] = f"manifest of batch {batch.batch_id}"
        return needed

    def end_leases(self) -> None:
        """Nobody holds a row any more: the run is removed."""
        for group in self._groups.values():
            for grant in group.grants:
                grant.mask = 0

    def complete_spec(self, spec: RunSpec) -> None:
        """The spec says more than before: the vocabulary."""
        if spec != self.spec:
            self.spec = spec
            self._commit_log.put(Table.META, self.spec_key, encode_record(encode_spec(spec)))

    # --- trainer and versions

    def begin_epoch(self, epoch: int, owner: str) -> None:
        """`owner` has the run now; batches that an older epoch took and did not settle are complete groups again."""
        self.record.epoch, self.record.owner = epoch, owner
        self.give_back([batch for batch in self._batches.values() if not batch.settled])

    def note_deaths(self, batches: Sequence[TakenBatch]) -> list[Group]:
        """A trainer died with all of `batches` in hand; returns their groups."""
        groups = [group for batch in batches for group in self.groups_of(batch)]
        for group in groups:
            group.deaths += 1
        return groups

    def publish(self, version: Version) -> None:
        """`version` is the newest one; batches of earlier steps may become consumed."""
        self.record.published = version
        self.publishes += 1
        self.recount()

    # --- the feed

    def opened_by(self, caller: str) -> None:
        """Note who opened the run."""
        self.record.opened_by = caller

    def admit(self, task_id: str, metadata: TaskMetadata, payload: bytes, size: int) -> Group:
        """A task that is not known comes in as a group of `size` rows; `payload` is the packed task."""
        number = self.record.next_group
        self.record.next_group += 1
        self.known_tasks.add(task_id, number)
        group = self._add_group(number, task_id, metadata, len(payload), [0] * size)
        self._commit_log.put(Table.PAYLOAD, group.task_key, with_checksum(payload))
        return group

    def move_cursor(self, cursor: str) -> None:
        """The feeder's position changed."""
        self.record.cursor = cursor

    def close_feed(self) -> None:
        """No task will come any more."""
        self.record.feed_closed = True

    # --- batches

    def open_batch(
        self, batch_id: str, step: int, epoch: int, groups: Sequence[Group], manifest: bytes
    ) -> None:
        """A trainer takes complete `groups`, whose rows all have every column.

        `manifest` is what `take` answers, for a caller that asks again.
        """
        batch = TakenBatch(self.number, self.record.next_batch, batch_id, step, epoch)
        self.record.next_batch += 1
        self._batches[batch_id] = batch
        now = self.clock()
        for group in groups:
            self.withdraw(group)
            self._put_in(group, batch)
            if group.position < 0:
                self.ready_to_taken.add(now - group.since, group.present.bit_count())
                group.position = self.record.next_position
                self.record.next_position += 1
            self._refresh(group)
        self._commit_log.touch(batch)
        self._commit_log.put(Table.PAYLOAD, batch.manifest_key, manifest)

    def settle(self, batch: TakenBatch) -> None:
        """The batch went into its optimizer step."""
        batch.settled = True
        for group in self.groups_of(batch):
            if group.deaths or group.failed_in:
                group.deaths = group.failed_in = 0
                self._commit_log.touch(group)
            self._refresh(group)
        self._commit_log.touch(batch)
        self.recount()

    def commit(self, step: int) -> None:
        """A checkpoint covers the steps before `step`: rows that were settled at these leave as trained."""
        for batch in [b for b in self._batches.values() if b.settled and b.step < step]:
            for group in self.groups_of(batch):
                self.remove_group(group, Exit.TRAINED, "")
            self._close_batch(batch)
        self.record.committed_step = step

    def rewind(self, step: int) -> int:
        """Batches of older epochs settled at `step` or later are complete groups again; returns the rows.

        `step` is published, unless this epoch has published already: a request that was delayed in the network and
        arrives once more must not give back what this trainer has learned from, nor the version of its fleet.
        """
        batches = [
            batch
            for batch in self._batches.values()
            if batch.settled and batch.step >= step and batch.epoch < self.record.epoch
        ]
        rows = sum(g.present.bit_count() for batch in batches for g in self.groups_of(batch))
        self.give_back(batches)
        if self.record.published.epoch < self.record.epoch:
            self.record.published = Version(self.record.epoch, step)
        self.gate_signal.notify()
        self.recount()
        self.complete_signal.notify()
        return rows

    def give_back(self, batches: Sequence[TakenBatch]) -> None:
        """The groups of `batches` are complete groups again, in the order in which they were taken."""
        for batch in batches:
            batch.settled = False
            groups = self.groups_of(batch)
            for group in groups:
                self.in_batches -= 1
                if batch.consumed:
                    self._consumed -= 1
                    self._count_open(group, 1)
                group.batch = None
                self._count_sampled(group, 1)
                self._refresh(group)
                self.offer(group)
            self.save(groups)
            batch.groups.clear()
            self._close_batch(batch)

    def show(self, batch: TakenBatch) -> None:
        """A trainer is told of the batch."""
        batch.answered = True

    def take_out(self, batch: TakenBatch, groups: Sequence[Group]) -> None:
        """`groups` leave a batch that nobody has seen, and are open again."""
        for group in groups:
            batch.groups.remove(group.number)
            self.in_batches -= 1
            group.batch = None
            self._count_sampled(group, 1)
            self._refresh(group)
        self.save(groups)

    def rewrite_manifest(self, batch: TakenBatch, manifest: bytes) -> None:
        """What `take` answers is `manifest`."""
        self._commit_log.put(Table.PAYLOAD, batch.manifest_key, manifest)

    def recount(self) -> None:
        """The published version or a batch changed: find the batches that hold no credit any more. O(batches)."""
        for batch in self._batches.values():
            consumed = batch.settled and (
                not self.spec.gated or batch.step < self.record.published.step
            )
            if consumed is not batch.consumed:
                batch.consumed = consumed
                self._consumed += len(batch.groups) if consumed else -len(batch.groups)
                for group in self.groups_of(batch):
                    self._count_open(group, -1 if consumed else 1)
        self.admission_signal.notify()
        self.notify_stages()

    def _put_in(self, group: Group, batch: TakenBatch) -> None:
        self._count_sampled(group, -1)
        group.batch = batch
        batch.groups.append(group.number)
        self.in_batches += 1

    def _close_batch(self, batch: TakenBatch) -> None:
        del self._batches[batch.batch_id]
        self._commit_log.delete(Table.META, batch.key)
        self._commit_log.delete(Table.PAYLOAD, batch.manifest_key)

    # --- groups and dead letters

    def remove_group(self, group: Group, exit_: Exit, reason: str) -> None:
        """Every remaining row leaves, and the group with them."""
        if group.present:
            self.remove_rows(group, group.present, exit_, reason)
        self.withdraw(group)
        batch = group.batch
        if batch is not None:
            batch.groups.remove(group.number)
            self.in_batches -= 1
        else:
            self._count_sampled(group, -1)
        if batch is not None and batch.consumed:
            self._consumed -= 1
        else:
            self.open_bytes -= group.task_bytes
        del self._groups[group.number]
        del self._by_task[group.task_id]
        self._commit_log.delete(Table.META, group.key)
        dead = self._dead.by_group.get(group.number, [])
        for row in dead:
            row.attempts = list(group.attempts)
            self._commit_log.touch(row)
        if not dead:
            self._commit_log.delete(Table.PAYLOAD, group.task_key)
            self.known_tasks.mark_departed(group.task_id)
        self.notify_stages()
        self.complete_signal.notify()
        self.admission_signal.notify()
        if self.record.feed_closed and not self._groups:
            self.gate_signal.notify()

    def note_failure(self, stage: Stage, uid: Uid, reason: str) -> None:
        """A worker could not finish a row."""
        now, before = self.clock(), self._failures.get(stage.name)
        self._failures[stage.name] = LastFailure(
            count=before.count + 1 if before else 1,
            first=before.first if before else now,
            last=now,
            uid=uid,
            reason=reason,
        )

    def dead_letter(
        self, group: Group, index: int, stage: Stage, outcome: Outcome, reason: str
    ) -> None:
        """The row at `index` leaves as a dead letter of `stage`."""
        row = DeadRow(
            run_number=self.number,
            number=self.record.next_dead,
            letter=DeadLetter(
                uid=group.uid(index),
                stage=stage.name,
                outcome=outcome,
                reason=reason,
                attempts=group.deliveries[stage.number][index],
            ),
            group=group.number,
            metadata=group.metadata,
            task_bytes=group.task_bytes,
            attempts=list(group.attempts),
        )
        self.record.next_dead += 1
        self._dead.add(row)
        self._commit_log.touch(row)
        self.remove_rows(group, 1 << index, Exit.DEAD, reason)

    def remove_dead_letter(self, row: DeadRow) -> None:
        """A dead letter is answered, or dropped."""
        self._dead.remove(row)
        self._commit_log.delete(Table.META, row.key)

    def drop_dead_letters(self) -> int:
        """Drop the oldest letters beyond what a run may keep, with the tasks that nothing else needs; how many.

        The ledger goes on counting their rows as dead-lettered.
        """
        before, quota = self.record.dropped_letters, self._quota
        while len(self.dead_letters) > 1 and (
            len(self.dead_letters) > quota.dead_letters
            or self._dead.nbytes > quota.dead_letter_bytes
        ):
            row = next(iter(self.dead_letters.values()))
            self.remove_dead_letter(row)
            self.record.dropped_letters += 1
            if row.group not in self._dead.by_group and row.group not in self._groups:
                self._commit_log.delete(Table.PAYLOAD, task_key(self.number, row.group))
                self.known_tasks.mark_departed(row.letter.uid.task)
        return self.record.dropped_letters - before

    def readmit(self, row: DeadRow) -> Group:
        """The task of a dead row whose group left comes in again, with a new attempt at each index."""
        attempts = [attempt + 1 for attempt in row.attempts]
        task_id = row.letter.uid.task
        return self._add_group(row.group, task_id, row.metadata, row.task_bytes, attempts)

    # --- restoring from a store

    def restore_batches(self, batches: Iterable[TakenBatch]) -> None:
        """Batches as they were stored, without groups."""
        self._batches.update({batch.batch_id: batch for batch in batches})

    def restore_dead_letter(self, row: DeadRow) -> None:
        """A dead letter as it was stored."""
        self._dead.add(row)

    def restore_group(self, group: Group, batch: TakenBatch | None) -> None:
        """A group as it was stored, with the batch that has it. Its leases go on, each with a full time to live."""
        self._groups[group.number] = group
        self._by_task[group.task_id] = group
        self._count_open(group, 1)
        known = [facts.oldest.step for facts in group.facts_of(group.present)]
        if known or group.grants:
            self._sample_from(group, min(known, default=self.record.published.step))
        if batch is not None:
            self._put_in(group, batch)
        for grant in group.grants:
            grant.deadline = self.lease_deadline()
            self._expiry.watch(grant)
        self._refresh(group)

    def restore_departed(self) -> None:
        """Every known task that neither has a group nor is needed by a dead letter has left."""
        dead = {uid.task for uid in self._dead.by_uid}
        self.known_tasks.restore_departed({*self._by_task, *dead})
