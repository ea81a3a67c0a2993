"""The workers' operations on rows: lease, renew, write, fail, release; and what happens when a lease expires."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeAlias

from meshrl.contract.errors import CorruptError, EndOfDataError, FencedError, UserError
from meshrl.contract.types import Outcome, RowBlock, Uid, Version
from meshrl.transferqueue.model.fair_share import Holder
from meshrl.transferqueue.model.group import Grant, Group, bits
from meshrl.transferqueue.model.run import Run
from meshrl.transferqueue.model.signals import Signal
from meshrl.transferqueue.model.stages import Stage
from meshrl.transferqueue.operations import dead_letters, lifecycle, payload
from meshrl.transferqueue.operations.payload import Unread, stored_frames

EXPIRED = "lease expired"


CheckedBlock: TypeAlias = tuple[Group, int, RowBlock]
"""A group, the set of those of its rows that are to be written, and the block of these."""


def leasable(runs: Mapping[str, Run], names: Sequence[str], stage: str) -> list[tuple[Run, Stage]]:
    """The runs of `names` that are open and have the stage, highest priority first.

    Raises:
        EndOfDataError: no run has rows left, and no run will get any.
        UserError: all runs are open and none has the stage.
    """
    opened = [run for name in names if (run := runs.get(name)) is not None]
    candidates = [(run, spec) for run in opened if (spec := run.stages.get(stage)) is not None]
    if len(opened) == len(names):
        if not candidates:
            raise UserError(
                f"no stage named {stage!r} in {', '.join(names)} (run {names[0]} has"
                f" {', '.join(spec.name for spec in opened[0].stages.ordered)})"
            )
        if all(run.record.feed_closed and not run.groups for run in opened):
            raise EndOfDataError(f"nothing is left to lease in {', '.join(names)}")
    return sorted(candidates, key=lambda pair: -pair[0].spec.priority)


def open_to(run: Run, stage: Stage, version: Version | None) -> bool:
    """True if an engine at `version` may get rows; only stages that sample for a gated run depend on it."""
    if not (run.spec.gated and stage.first):
        return True
    if version is None:
        raise UserError(
            f"run {run.name} is gated: a lease of stage {stage.name} must name its engine's version"
        )
    behind = run.record.published.step - version.step
    return version.epoch == run.record.epoch and behind <= run.spec.max_staleness


def enough(run: Run, stage: Stage, at_least: int) -> bool:
    """True when the lease can be answered: `at_least` rows are ready, or some are and no more can come.

    `at_least` applies to gated runs only. The feed of an evaluation stays open between evaluations, so there a lease
    would wait for the next evaluation.
    """
    available = run.num_ready(stage)
    if available == 0 or available >= at_least or not run.spec.gated:
        return available > 0
    upstream = 0 if stage.first else run.ledger.unstarted
    return not upstream and not lifecycle.can_grow(run)


def grant(run: Run, stage: Stage, worker: str, limit: int) -> list[Unread]:
    """Deliver at most `limit` rows to `worker`."""
    grants = run.grant(stage, worker, limit)
    granted: list[Unread] = []
    for each in grants:
        group, indices = each.group, bits(each.mask)
        deliveries = group.deliveries[stage.number]
        frames, progress = stored_frames(
            group, indices, each.mask, stage.after, progress_of=stage.number
        )
        block = RowBlock(
            task=group.task_id,
            indices=indices,
            attempts=tuple([group.attempts[index] for index in indices]),
            token=each.token,
        )
        delivered = tuple([deliveries[index] for index in indices])
        granted.append(Unread(block, group.task_key, frames, progress, delivered))
    run.save([each.group for each in grants])
    return granted


def renew(run: Run, stage: Stage, worker: str, uids: Iterable[Uid]) -> list[Uid]:
    """Extend leases; returns the rows that `worker` does not hold any more. Deadlines are not stored."""
    lost: list[Uid] = []
    named: dict[int, int] = {}
    for uid in uids:
        group = run.find(uid)
        if group is None or not _held_by(group, stage, worker) >> uid.index & 1:
            lost.append(uid)
        else:
            named[group.number] = named.get(group.number, 0) | 1 << uid.index
    deadline = run.lease_deadline()
    if stage.first:
        run.fair_share.holder(worker, run.clock())
    for number, mask in named.items():
        group = run.groups[number]
        for grant in list(group.grants):
            if grant.stage == stage.number and grant.worker == worker and grant.mask & mask:
                run.extend(grant, mask, deadline)
    return lost


def _held_by(group: Group, stage: Stage, worker: str) -> int:
    mask = 0
    for grant in group.grants:
        if grant.stage == stage.number and grant.worker == worker:
            mask |= grant.mask
    return mask


def checked(run: Run, stage: Stage, blocks: Sequence[RowBlock]) -> list[CheckedBlock]:
    """The checked writes; rows that were written before under the same token are skipped.

    Raises:
        FencedError: with `uid`; another worker holds the row, or the lease ended.
        UserError: with `uid`; a column is wrong, or a row is named twice.
    """
    found: list[CheckedBlock] = []
    named: dict[int, int] = {}
    for block in blocks:
        group, mask = _rows_to_write(run, stage, block)
        check_frame(run, block)
        payload.check(run, block, stage, group)
        if group is None or not mask:
            continue
        if named.get(group.number, 0) & mask:
            uid = group.uid(bits(named[group.number] & mask)[0])
            raise UserError(f"row {uid} is written twice in one call", uid=uid)
        named[group.number] = named.get(group.number, 0) | mask
        if mask.bit_count() < len(block):
            block = block.part([at for at, index in enumerate(block.indices) if mask >> index & 1])
        found.append((group, mask, block))
    return found


def _rows_to_write(run: Run, stage: Stage, block: RowBlock) -> tuple[Group | None, int]:
    """The group, and the mask of the rows to write: held under the block's token and not written yet."""
    group = run.by_task.get(block.task)
    held = group.held_under(stage.number, block.token) if group else 0
    if group is not None and (all_of := group.mask_of(block)) and all_of & held == all_of:
        return group, all_of
    mask = 0
    for index, attempt in zip(block.indices, block.attempts, strict=True):
        if group is not None and group.has(index, attempt):
            if held >> index & 1:
                mask |= 1 << index
                continue
            written = group.done[stage.number] >> index & 1
            if written and group.writers[stage.number][index] == block.token:
                continue
        raise fenced(run, stage, Uid(run.name, block.task, index, attempt), block.token)
    return group, mask


def check_frame(run: Run, block: RowBlock) -> None:
    """Compare the frame with its checksum and with the rows that the block names. Raises UserError, with `uid`."""
    if not block.indices:
        raise UserError(f"a write to task {block.task!r} names no row", task=block.task)
    uid = Uid(run.name, block.task, block.indices[0], block.attempts[0])
    frame = block.frame
    try:
        frame.columns  # noqa: B018
    except CorruptError as error:
        raise UserError(f"row {uid}: {error.message}", uid=uid) from error
    rows = frame.rows
    in_order = frame.places is None or frame.places == tuple(range(rows))
    if rows != len(block) or len(set(block.indices)) != rows or not in_order:
        raise UserError(f"row {uid}: {len(block)} rows are named, the frame has {rows}", uid=uid)


def write(run: Run, stage: Stage, blocks: Sequence[CheckedBlock]) -> None:
    """Add the columns of checked writes."""
    holders: dict[Holder, None] = {}
    for group, mask, block in blocks:
        holders.update(dict.fromkeys(run.write(stage, group, mask, block)))
        lifecycle.offer_if_complete(run, group)
    run.save([group for group, _, _ in blocks])
    run.notify_shares(stage, holders)


def share(run: Run, stage: Stage, worker: str, limit: int, at_least: int) -> int:
    """How many rows `worker` is granted now: its fair share, or `limit` if the caller asked for a fixed number."""
    if not stage.first or at_least > 1:
        return limit
    return run.fair_share.share(
        worker,
        run.num_ready(stage),
        limit,
        now=run.clock(),
        silence_s=run.spec.lease_ttl_s,
    )


def signals(candidates: Sequence[tuple[Run, Stage]], worker: str, at_least: int) -> list[Signal]:
    """What wakes a lease of `worker` that waits for `at_least` rows of one of `candidates`."""
    if at_least > 1:
        return [
            s
            for run, stage in candidates
            for s in (run.rows_signals[stage.number], run.gate_signal)
        ]
    found: list[Signal] = []
    for run, stage in candidates:
        turns: Signal = run.turns[stage.number]
        if stage.first:
            holder = run.fair_share.holder(worker, run.clock())
            found.append(holder.wrote)
            # Its share allows a worker without rows one at least; many others would look in vain.
            turns = turns if holder.rows else run.turns[stage.number].ahead
        found += (turns, run.gate_signal)
    return found


@contextmanager
def waiting(candidates: Sequence[tuple[Run, Stage]], worker: str) -> Iterator[None]:
    """`worker` waits for rows that it would sample, for as long as the block runs."""
    runs = [run for run, stage in candidates if stage.first]
    for run in runs:
        run.fair_share.count_wait(worker, run.clock(), 1)
    try:
        yield
    finally:
        for run in runs:
            run.fair_share.count_wait(worker, run.clock(), -1)


def fail(run: Run, stage: Stage, uid: Uid, token: int, outcome: Outcome, reason: str) -> None:
    """A worker reports that it cannot finish a row. Raises FencedError, with `uid`."""
    group = run.find(uid)
    if group is None or not group.held_under(stage.number, token) >> uid.index & 1:
        raise fenced(run, stage, uid, token)
    run.note_failure(stage, uid, reason)
    _redeliver(run, stage, group, 1 << uid.index, outcome, reason)


def release(run: Run, stage: Stage, token_of: Mapping[Uid, int]) -> None:
    """Rows come back untouched; rows that the caller does not hold any more are skipped."""
    masks: dict[int, int] = {}
    for uid, token in token_of.items():
        group = run.find(uid)
        if group is not None and group.held_under(stage.number, token) >> uid.index & 1:
            masks[group.number] = masks.get(group.number, 0) | 1 << uid.index
    for number, mask in masks.items():
        run.return_rows(stage, run.groups[number], mask, undelivered=True)
    if masks:
        run.save([run.groups[number] for number in masks])


def expired(run: Run, grant: Grant, *, attended: bool) -> None:
    """The worker was silent for `lease_ttl_s`: its rows go to another one.

    If the worker is `attended` and never renewed the rows, they never reached it: that does not count as an attempt.
    """
    stage = run.stages.ordered[grant.stage]
    run.count_expiry(stage, grant, delivered=grant.renewed or not attended)
    _redeliver(run, stage, grant.group, grant.mask, Outcome.INFRA_FAULT, EXPIRED)


def _redeliver(
    run: Run, stage: Stage, group: Group, mask: int, outcome: Outcome, reason: str
) -> None:
    """Rows come back; those that had their last delivery are dead-lettered."""
    run.return_rows(stage, group, mask)
    run.save([group])
    deliveries = group.deliveries[stage.number]
    for index in bits(mask):
        # A dead letter may take its siblings with it.
        if deliveries[index] >= run.spec.max_attempts and group.present >> index & 1:
            dead_letters.dead_letter(run, group, index, stage, outcome, reason)


def fenced(run: Run, stage: Stage, uid: Uid, token: int) -> FencedError:
    """The error for a write under `token`: it names the worker that holds the row now."""
    group = run.find(uid)
    holders = [
        f"{grant.worker} holds it under token {grant.token}"
        for grant in (group.grants if group else ())
        if grant.stage == stage.number and grant.mask >> uid.index & 1
    ]
    holder = holders[0] if holders else "the lease ended"
    return FencedError(f"row {uid}, stage {stage.name}: token {token} is fenced, {holder}", uid=uid)
