"""One run in RAM: its verbs, one method each, and its records.

    ResidentRows (rows.py) ▸ FeederVerbs (groups.py) ▸ WorkerVerbs (leases.py) ▸ TrainerVerbs (batches.py) ▸ Run

Each class adds verbs to the one before: the feeder's, the workers', the trainer's. A verb is synchronous: it changes
RAM, stages the records in the commit log and wakes who waits. README.md has the states that they move rows between.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from meshrl.contract.types import Json, RunSpec, RunState
from meshrl.transferqueue.model.batches import TrainerVerbs
from meshrl.transferqueue.model.group import Group, task_key
from meshrl.transferqueue.model.records import DeadRow, RunLedger, RunRecord, TakenBatch
from meshrl.transferqueue.model.specs import encode_spec
from meshrl.transferqueue.store import Record, Table, encode_record


class Run(TrainerVerbs):
    """The state of one run, and every transition of it."""

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

    def decode(self, stored: Json) -> None:
        """The inverse of `encode`."""
        fields = dict(stored)
        self.ledger = RunLedger.restored(fields.pop("books"))
        self.record = RunRecord.decode(fields)

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

    def opened_by(self, caller: str) -> None:
        """Note who opened the run."""
        self.record.opened_by = caller

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
