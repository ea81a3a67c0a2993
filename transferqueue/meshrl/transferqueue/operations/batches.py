"""The trainer's operations on complete groups: take, filter, settle, commit, rewind.

ready ──take──▶ taken ──settle(step)──▶ settled ──commit──▶ trained
  ▲               │ acquire by another      │
  └───────────────┴──────── rewind(step) ───┘    back in the order in which they were taken
"""

from __future__ import annotations

from collections.abc import Sequence

from meshrl.contract.errors import ConflictError, EndOfDataError, NotFoundError
from meshrl.contract.types import Batch, BatchGroup, Json, Outcome, Uid, Version
from meshrl.transferqueue.model.group import Group, bits
from meshrl.transferqueue.model.records import Exit, TakenBatch
from meshrl.transferqueue.model.run import Run
from meshrl.transferqueue.operations import group_policies
from meshrl.transferqueue.store import decode_record, encode_record


def take(run: Run, *, epoch: int, step: int, count: int, batch_id: str) -> Batch | None:
    """Take a batch of `count` complete groups; None if there are not enough yet.

    A closed feed ends with one smaller batch.

    Raises:
        EndOfDataError: the feed is closed and nothing is left to take.
    """
    groups = fresh_enough(run, step, count)
    if len(groups) < count:
        open_groups = len(run.groups) - run.in_batches
        if not run.feed_closed or len(run.complete) < open_groups:
            return None
        if not groups:
            raise EndOfDataError(
                f"run {run.name}: the feed is closed and every group is taken or has left"
            )
    for group in groups:
        run.withdraw(group)
        if group.unfinished:
            run.remove_rows(group, group.unfinished, Exit.FILTERED, group_policies.SPARE)
    batch = run.open_batch(batch_id, step, epoch, groups)
    manifest = tuple(map(_manifest, groups))
    run.store_manifest(batch, encode_record(list(map(_stored, manifest))))
    run.save(groups)
    return Batch(batch_id=batch_id, run=run.name, step=step, groups=manifest)


def fresh_enough(run: Run, step: int, count: int) -> list[Group]:
    """The next `count` complete groups in order (fewer if there are fewer); groups that are too old leave first."""
    while True:
        groups = [run.groups[number] for number in run.complete.first(count)]
        stale = [group for group in groups if group_policies.too_old(run, group, step)]
        if not stale:
            return groups
        for group in stale:
            group_policies.retire(run, group)


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
    """Taken rows leave as filtered. Rows that left before are skipped, so filtering twice is filtering once.

    Raises:
        NotFoundError: with `uid`; the task was never admitted.
        ConflictError: with `uid`; the row is resident and not taken.
    """
    rows: dict[int, tuple[Group, int]] = {}
    for uid in uids:
        group = run.find(uid)
        if group is None and uid.task not in run.known_tasks:
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
    """The batch went into optimizer step `step`; settling twice is settling once.

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
    run.settle(batch)
    run.save()


def commit(run: Run, step: int) -> None:
    """Rows settled before `step` are trained for good and leave; committing twice is committing once."""
    if step >= run.committed_step:
        run.commit(step)
        run.save()


def rewind(run: Run, step: int) -> int:
    """Rows settled at `step` or later are ready again, and `step` is the published version; returns the rows.

    Raises:
        ConflictError: rows of that step were committed and have left.
    """
    if step < run.committed_step:
        raise ConflictError(
            f"run {run.name} cannot go back to step {step}: rows before step"
            f" {run.committed_step} were committed and have left",
            committed_step=run.committed_step,
        )
    rows = run.rewind(step)
    run.save()
    return rows
