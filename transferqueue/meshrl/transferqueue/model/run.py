"""One run in RAM: its verbs, one method each, and its records.

    ResidentRows (rows.py) ▸ FeederVerbs (groups.py) ▸ WorkerVerbs (leases.py) ▸ TrainerVerbs (batches.py) ▸ Run

Each class adds verbs to the one before: the feeder's, the workers', the trainer's. A verb is synchronous: it changes
RAM, stages the records in the commit log and wakes who waits. README.md has the states that they move rows between.

`restore` rebuilds the runs from the records of a store when a queue opens. Keys of META, each with the run's number:
r spec · s state and ledger · g group with its rows · b batch · d dead letter · n task that was admitted · x audit log
· y sum of older audit log records. Keys of PAYLOAD: t task · c frame of columns of one stage · m manifest of a batch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeAlias

from meshrl.contract.errors import CorruptError
from meshrl.contract.types import Json, RunSpec, RunState
from meshrl.transferqueue.model.batches import TrainerVerbs
from meshrl.transferqueue.model.group import Group, task_key
from meshrl.transferqueue.model.records import DeadRow, RunLedger, RunRecord, TakenBatch
from meshrl.transferqueue.model.specs import decode_spec, encode_spec
from meshrl.transferqueue.store import Record, Table, decode_record, encode_record

Sorted: TypeAlias = dict[bytes, list[tuple[bytes, bytes]]]


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
        """Restore what `encode` stored."""
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
        """End all leases: the run is removed."""
        for group in self._groups.values():
            for grant in group.grants:
                grant.mask = 0

    def complete_spec(self, spec: RunSpec) -> None:
        """Add the vocabulary to the spec."""
        if spec != self.spec:
            self.spec = spec
            self._commit_log.put(Table.META, self.spec_key, encode_record(encode_spec(spec)))

    def opened_by(self, caller: str) -> None:
        """Note who opened the run."""
        self.record.opened_by = caller

    def restore_batches(self, batches: Iterable[TakenBatch]) -> None:
        """Restore stored batches, without groups."""
        self._batches.update({batch.batch_id: batch for batch in batches})

    def restore_dead_letter(self, row: DeadRow) -> None:
        """Restore a stored dead letter."""
        self._dead.add(row)

    def restore_group(self, group: Group, batch: TakenBatch | None) -> None:
        """Restore a stored group, with the batch that has it. Its leases continue, each with a full time to live."""
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
        """Mark every known task as departed that neither has a group nor is needed by a dead letter."""
        dead = {uid.task for uid in self._dead.by_uid}
        self.known_tasks.restore_departed({*self._by_task, *dead})


def restore(
    items: Sequence[tuple[bytes, bytes]], make_run: Callable[[RunSpec, int], Run]
) -> dict[str, Run]:
    """The runs by name. Leases continue under their tokens, each with a full time to live.

    Raises:
        CorruptError: a record differs from what was written.
    """
    by_run: defaultdict[bytes, Sorted] = defaultdict(lambda: defaultdict(list))
    for key, value in items:
        by_run[key[1:5]][key[:1]].append((key, value))
    runs: dict[str, Run] = {}
    for number, records in by_run.items():
        try:
            run = _restore_run(int.from_bytes(number, "big"), records, make_run)
        except (KeyError, ValueError, IndexError, TypeError) as error:
            raise CorruptError(
                f"queue store: run number {number.hex()} cannot be read back"
                f" ({type(error).__name__}: {error})"
            ) from error
        runs[run.name] = run
    return runs


def _restore_run(number: int, records: Sorted, make_run: Callable[[RunSpec, int], Run]) -> Run:
    run = make_run(decode_spec(_single(records[b"r"])), number)
    run.decode(_single(records[b"s"]))
    run.known_tasks.restore(_items(records[b"n"]))
    older: Json = next(_values(records[b"y"]), {})
    run.audit_log.restore(older, list(_items(records[b"x"])))
    batches = {
        batch.number: batch
        for batch in (TakenBatch.restored(number, stored) for stored in _values(records[b"b"]))
    }
    run.restore_batches(batches.values())
    for stored in _values(records[b"d"]):
        run.restore_dead_letter(DeadRow.restored(number, stored))
    for key, stored in _items(records[b"g"]):
        group, batch_number = Group.restored(run.name, number, stored, run.clock())
        if group.key != key:
            raise ValueError(f"record {key.hex()} is that of group {group.number}")
        run.restore_group(group, batches[batch_number] if batch_number >= 0 else None)
        taken_before = group.position >= 0 and not group.unfinished
        if group.batch is None and (taken_before or run.is_complete(group)):
            run.offer(group)
    run.restore_departed()
    run.recount()
    return run


def _items(items: Sequence[tuple[bytes, bytes]]) -> Iterator[tuple[bytes, Json]]:
    """Key and value of each record."""
    return zip([key for key, _ in items], _values(items), strict=True)


def _values(items: Iterable[tuple[bytes, bytes]]) -> Iterator[Json]:
    return (decode_record(value, f"record {key.hex()}") for key, value in items)


def _single(items: Sequence[tuple[bytes, bytes]]) -> Json:
    (item,) = items
    return next(iter(_values([item])))
