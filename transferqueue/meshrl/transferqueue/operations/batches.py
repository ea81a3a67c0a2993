"""What a trainer does with complete groups: take, filter, settle, commit, rewind.

ready ──take──▶ taken ──settle(step)──▶ settled ──commit──▶ trained
  ▲               │ acquire by another      │
  └───────────────┴──────── rewind(step) ───┘    back in the order in which they were taken
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from meshrl.contract.errors import ConflictError, EndOfDataError, NotFoundError
from meshrl.contract.types import Batch, BatchGroup, Json, Outcome, Uid, Version
from meshrl.transferqueue.model import policies
from meshrl.transferqueue.model.group import Group
from meshrl.transferqueue.model.ledger import Exit
from meshrl.transferqueue.model.masks import bits
from meshrl.transferqueue.operations import admission
from meshrl.transferqueue.records import decode_record, encode_record
from meshrl.transferqueue.store import Table

if TYPE_CHECKING:
    from meshrl.transferqueue.model.run import Run


@dataclass(slots=True, eq=False)
class TakenBatch:
    """Groups in a trainer's hands, or in an optimizer step that no checkpoint covers yet."""

    run_number: int
    number: int
    batch_id: str
    step: int
    epoch: int
    settled: bool = False
    consumed: bool = False
    """Its groups hold no credit any more; derived, see admission.py."""
    groups: dict[int, Group] = field(default_factory=dict)
    """What is left of them after `filter`; stored with the groups."""

    @property
    def key(self) -> bytes:
        """Of the record."""
        return b"b" + self._suffix

    @property
    def manifest_key(self) -> bytes:
        """Of the manifest: what `take` answered, for whoever asks again."""
        return b"m" + self._suffix

    @property
    def _suffix(self) -> bytes:
        return self.run_number.to_bytes(4, "big") + self.number.to_bytes(8, "big")

    def encode(self) -> bytes:
        """The record."""
        return encode_record([self.number, self.batch_id, self.step, self.epoch, self.settled])


def take(run: Run, *, epoch: int, step: int, count: int, batch_id: str) -> Batch | None:
    """A batch of `count` complete groups, or None: not now.

    Raises:
        EndOfDataError: the feed is closed and nothing is left to take.
    """
    found = fresh_enough(run, step, count)
    if len(found) < count:
        open_groups = len(run.groups) - run.in_batches
        if not run.feed_closed or run.complete < open_groups:
            return None
        if not found:
            raise EndOfDataError(
                f"run {run.name}: the feed is closed and every group is taken or has left"
            )
    batch = TakenBatch(run.number, run.next_batch, batch_id, step, epoch)
    run.next_batch += 1
    run.batches[batch_id] = batch
    for group in found:
        _put_in(run, batch, group)
    manifest = tuple(map(_manifest, found))
    run.commit_log.put(
        Table.PAYLOAD, batch.manifest_key, encode_record(list(map(_stored, manifest)))
    )
    run.commit_log.touch(batch)
    run.save(found)
    return Batch(batch_id=batch_id, run=run.name, step=step, groups=manifest)


def fresh_enough(run: Run, step: int, count: int) -> list[Group]:
    """The next `count` groups in order (fewer if there are fewer); groups that grew too old leave on the way."""
    while True:
        found = _next_groups(run, count)
        stale = [group for group in found if policies.too_old(run, group, step)]
        if not stale:
            return found
        for group in stale:
            policies.retire(run, group)


def _next_groups(run: Run, count: int) -> list[Group]:
    """What was taken before comes first, in its old order; then the sampler's order."""
    numbers = list(run.replay.first(count))
    if len(numbers) < count:
        numbers += run.sampler.first(count - len(numbers))
    return [run.groups[number] for number in numbers]


def _put_in(run: Run, batch: TakenBatch, group: Group) -> None:
    run.withdraw(group)
    if group.unfinished:
        run.remove_rows(group, group.unfinished, Exit.FILTERED, policies.SPARE)
    group.batch = batch
    batch.groups[group.number] = group
    run.in_batches += 1
    if group.position < 0:
        run.ready_to_taken.add(run.clock() - group.since, group.present.bit_count())
        group.position = run.next_position
        run.next_position += 1
    run.refresh(group)


def _manifest(group: Group) -> BatchGroup:
    indices = bits(group.present)
    outcomes, num_tokens, oldest, newest, _ = zip(*group.facts_of(group.present), strict=True)
    return BatchGroup(
        task=group.task_id,
        indices=indices,
        attempts=group.attempts_at(indices),
        size=group.size,
        num_tokens=num_tokens,
        oldest=oldest,
        newest=newest,
        outcomes=outcomes,
    )


def _stored(group: BatchGroup) -> Json:
    return (
        *(group.task, group.indices, group.attempts, group.size, group.num_tokens),
        # Plain tuples: orjson takes no others.
        *(list(map(tuple, group.oldest)), list(map(tuple, group.newest))),
        group.outcomes,
    )


def read_manifest(run: str, batch: TakenBatch, value: bytes) -> Batch:
    """The batch as `take` answered it. Raises CorruptError."""
    groups = tuple(
        BatchGroup(
            task=task,
            indices=tuple(indices),
            attempts=tuple(attempts),
            size=size,
            num_tokens=tuple(num_tokens),
            oldest=tuple(Version(*version) for version in oldest),
            newest=tuple(Version(*version) for version in newest),
            outcomes=tuple(map(Outcome, outcomes)),
        )
        for task, indices, attempts, size, num_tokens, oldest, newest, outcomes in decode_record(
            value, f"manifest of batch {batch.batch_id}"
        )
    )
    return Batch(batch_id=batch.batch_id, run=run, step=batch.step, groups=groups)


def filter_rows(run: Run, uids: Sequence[Uid], reason: str) -> None:
    """Taken rows leave as filtered; rows that left before are passed over, so that filtering twice is once.

    Raises:
        NotFoundError: a task that was never admitted, with `uid`.
        ConflictError: a row that is here and not taken, with `uid`.
    """
    rows: dict[int, tuple[Group, int]] = {}
    for uid in uids:
        group = run.find(uid)
        if group is None and uid.task not in run.seen:
            raise NotFoundError(f"no row {uid} in run {run.name}", uid=uid)
        if group is None:
            continue
        if group.batch is None or group.batch.settled:
            state = run.state_of(group, uid.index)
            raise ConflictError(f"row {uid} is {state}, only taken rows are filtered", uid=uid)
        _, mask = rows.get(group.number, (group, 0))
        rows[group.number] = (group, mask | 1 << uid.index)
    for group, mask in rows.values():
        run.remove_rows(group, mask, Exit.FILTERED, reason)
        if not group.present:
            run.remove_group(group, Exit.FILTERED, reason)
    run.save([group for group, _ in rows.values()])


def settle(run: Run, *, step: int, batch_id: str) -> None:
    """The batch went into optimizer step `step`; twice is once.

    Raises:
        NotFoundError: no such batch. ConflictError: it was taken for another step.
    """
    batch = run.batches.get(batch_id)
    if batch is None:
        if step < run.committed_step:
            return  # settled and committed: the call is a repetition
        raise NotFoundError(f"run {run.name} has no batch {batch_id!r}", batch_id=batch_id)
    if batch.step != step:
        raise ConflictError(f"batch {batch_id} was taken for step {batch.step}, not {step}")
    if batch.settled:
        return
    batch.settled = True
    for group in batch.groups.values():
        run.refresh(group)
    run.commit_log.touch(batch)
    run.save()
    admission.recount(run)


def commit(run: Run, step: int) -> None:
    """Rows settled before `step` are trained for good and leave; twice is once."""
    if step < run.committed_step:
        return
    for batch in [b for b in run.batches.values() if b.settled and b.step < step]:
        for group in list(batch.groups.values()):
            run.remove_group(group, Exit.TRAINED, "")
        _forget(run, batch)
    run.committed_step = step
    run.save()


def rewind(run: Run, step: int) -> int:
    """Rows settled at `step` or later are ready again, and the published version is that of `step`.

    Raises:
        ConflictError: rows of that step have been committed and are gone.
    """
    if step < run.committed_step:
        raise ConflictError(
            f"run {run.name} cannot go back to step {step}: rows before step"
            f" {run.committed_step} were committed and have left",
            committed_step=run.committed_step,
        )
    back = [batch for batch in run.batches.values() if batch.settled and batch.step >= step]
    rows = sum(g.present.bit_count() for batch in back for g in batch.groups.values())
    _give_back(run, back)
    run.published = Version(run.epoch, step)
    run.save()
    admission.recount(run)
    run.complete_signal.notify()
    return rows


def give_back_taken(run: Run) -> None:
    """A new epoch: what an older one had taken and not settled is ready again."""
    _give_back(run, [batch for batch in run.batches.values() if not batch.settled])


def _give_back(run: Run, batches: Sequence[TakenBatch]) -> None:
    for batch in batches:
        batch.settled = False
        for group in batch.groups.values():
            run.in_batches -= 1
            if batch.consumed:
                run.consumed -= 1
                run.open_load([group])
            group.batch = None
            run.refresh(group)
            run.offer(group)
        run.save(batch.groups.values())
        batch.groups.clear()
        _forget(run, batch)


def _forget(run: Run, batch: TakenBatch) -> None:
    del run.batches[batch.batch_id]
    run.commit_log.delete(Table.META, batch.key)
    run.commit_log.delete(Table.PAYLOAD, batch.manifest_key)
