"""The workers' operations on rows: lease, renew, write, fail, release; and what happens when a lease expires."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from meshrl.contract.errors import CorruptError, EndOfDataError, FencedError, UserError
from meshrl.contract.frames import Frame
from meshrl.contract.types import Outcome, PackedGroup, RowFacts, Uid, Version
from meshrl.transferqueue.model.fair_share import Holder
from meshrl.transferqueue.model.group import Grant, Group, bits
from meshrl.transferqueue.model.run import Run
from meshrl.transferqueue.model.signals import Signal
from meshrl.transferqueue.model.stages import Stage
from meshrl.transferqueue.operations import dead_letters, lifecycle, payload
from meshrl.transferqueue.operations.payload import Extract, located

EXPIRED = "lease expired"


class Granted(NamedTuple):
    """Rows of one group that were granted; their payload is read when the grant is durable."""

    extract: Extract
    token: int
    deliveries: tuple[int, ...]


class CheckedWrite(NamedTuple):
    """Checked columns of rows that are held under one token."""

    group: Group
    token: int
    rows: tuple[int, ...]
    """Row indices, in the order in which they lie in the frame."""
    mask: int
    facts: tuple[RowFacts, ...]
    frame: bytes


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


def grant(run: Run, stage: Stage, worker: str, limit: int) -> list[Granted]:
    """Deliver at most `limit` rows to `worker`."""
    grants = run.grant(stage, worker, limit)
    granted: list[Granted] = []
    for each in grants:
        group, indices = each.group, bits(each.mask)
        extract = located(
            group,
            indices,
            each.mask,
            stage.after,
            progress_of=stage.number,
        )
        deliveries = group.deliveries[stage.number]
        counts = tuple([deliveries[index] for index in indices])
        granted.append(Granted(extract, each.token, counts))
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


def checked(run: Run, stage: Stage, writes: Sequence[PackedGroup]) -> list[CheckedWrite]:
    """The checked writes; rows that were written before under the same token are skipped.

    Raises:
        FencedError: with `uid`; another worker holds the row, or the lease ended.
        UserError: with `uid`; a column is wrong, or a row is named twice.
    """
    checked_writes: list[CheckedWrite] = []
    named: dict[int, int] = {}
    for write in writes:
        group, mask = _rows_to_write(run, stage, write)
        frame = read_frame(run, write)
        payload.check(run, write, frame, stage, group)
        if group is None or not mask:
            continue
        if named.get(group.number, 0) & mask:
            uid = group.uid(bits(named[group.number] & mask)[0])
            raise UserError(f"row {uid} is written twice in one call", uid=uid)
        named[group.number] = named.get(group.number, 0) | mask
        checked_writes.append(_new_rows(group, write, mask, frame))
    return checked_writes


def _new_rows(group: Group, write: PackedGroup, mask: int, frame: Frame) -> CheckedWrite:
    """The part of a write that is about the rows in `mask`."""
    if mask.bit_count() == len(write.indices):
        return CheckedWrite(group, write.token, write.indices, mask, write.facts, write.frame)
    positions = [at for at, index in enumerate(write.indices) if mask >> index & 1]
    return CheckedWrite(
        group,
        write.token,
        tuple([write.indices[at] for at in positions]),
        mask,
        tuple([write.facts[at] for at in positions]) if write.facts else (),
        frame.select(frame.columns, positions),
    )


def _rows_to_write(run: Run, stage: Stage, write: PackedGroup) -> tuple[Group | None, int]:
    """The group, and the mask of the rows to write: held under the write's token and not written yet."""
    group = run.by_task.get(write.task)
    held = group.held_under(stage.number, write.token) if group else 0
    if group is not None and (all_of := group.mask_of(write)) and all_of & held == all_of:
        return group, all_of
    mask = 0
    for index, attempt in zip(write.indices, write.attempts, strict=True):
        if group is not None and group.has(index, attempt):
            if held >> index & 1:
                mask |= 1 << index
                continue
            written = group.done[stage.number] >> index & 1
            if written and group.writers[stage.number][index] == write.token:
                continue
        raise fenced(run, stage, Uid(run.name, write.task, index, attempt), write.token)
    return group, mask


def read_frame(run: Run, write: PackedGroup) -> Frame:
    """The frame of a write, which must have as many rows as the write names. Raises UserError, with `uid`."""
    if not write.indices:
        raise UserError(f"a write to task {write.task!r} names no row", task=write.task)
    uid = Uid(run.name, write.task, write.indices[0], write.attempts[0])
    try:
        frame = Frame(write.frame)
    except CorruptError as error:
        raise UserError(f"row {uid}: {error.message}", uid=uid) from error
    if frame.rows != len(write.indices) or len(set(write.indices)) != frame.rows:
        raise UserError(
            f"row {uid}: {len(write.indices)} rows are named, the frame has {frame.rows}", uid=uid
        )
    return frame


def write(run: Run, stage: Stage, writes: Sequence[CheckedWrite]) -> None:
    """Add the columns of checked writes."""
    holders: dict[Holder, None] = {}
    for item in writes:
        wrote = run.write(
            stage,
            item.group,
            item.rows,
            item.mask,
            frame=item.frame,
            token=item.token,
            facts=item.facts,
        )
        holders.update(dict.fromkeys(wrote))
        lifecycle.offer_if_complete(run, item.group)
    run.save([item.group for item in writes])
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
