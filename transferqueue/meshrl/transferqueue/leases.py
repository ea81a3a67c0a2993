"""What a worker does with rows: lease, renew, write, fail, release; and what happens when it falls silent."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from meshrl.contract.errors import EndOfDataError, FencedError, UserError
from meshrl.contract.nouns import Outcome, RowWrite, Uid, Version
from meshrl.transferqueue import admission, columns, dead, groups
from meshrl.transferqueue.frames import pack
from meshrl.transferqueue.ledger import State
from meshrl.transferqueue.rows import Group, Held, Row
from meshrl.transferqueue.stages import Stage
from meshrl.transferqueue.store import Table

if TYPE_CHECKING:
    from meshrl.transferqueue.run import Run

EXPIRED = "lease expired"


@dataclass(frozen=True, slots=True)
class Granted:
    """A row as it was granted; its payload is read once the grant is durable."""

    uid: Uid
    token: int
    delivery: int
    task_key: bytes
    frame_keys: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class PackedWrite:
    """A checked write with its frame."""

    row: Row
    write: RowWrite
    frame: bytes


def leasable(runs: Mapping[str, Run], names: Sequence[str], stage: str) -> list[tuple[Run, Stage]]:
    """Those of `names` that are open and have the stage, highest priority first.

    Raises:
        EndOfDataError: nothing is left in any of them and nothing will come.
        UserError: all are open and none has such a stage.
    """
    opened = [run for name in names if (run := runs.get(name)) is not None]
    found = [(run, spec) for run in opened if (spec := run.stages.get(stage)) is not None]
    if len(opened) == len(names):
        if not found:
            raise UserError(
                f"no stage named {stage!r} in {', '.join(names)} (run {names[0]} has"
                f" {', '.join(spec.name for spec in opened[0].stages)})"
            )
        if all(run.feed_closed and not run.groups for run in opened):
            raise EndOfDataError(f"nothing is left to lease in {', '.join(names)}")
    return sorted(found, key=lambda pair: -pair[0].spec.priority)


def open_to(run: Run, stage: Stage, version: Version | None) -> bool:
    """May an engine of `version` be given rows? Only sampling under a gated run asks this."""
    if not (run.spec.gated and stage.first):
        return True
    if version is None:
        raise UserError(
            f"run {run.name} is gated: a lease of stage {stage.name} must name its engine's version"
        )
    behind = run.published.step - version.step
    return version.epoch == run.epoch and behind <= run.spec.max_staleness


def enough(run: Run, stage: Stage, at_least: int) -> bool:
    """True when the lease can be answered: `at_least` rows are there, or some are and no more can come.

    Fixed partitions are for training; an evaluation's feed stays open between evaluations, so waiting for
    `at_least` there would be waiting for the next one.
    """
    available = len(run.ready[stage.number])
    if available == 0 or available >= at_least or not run.spec.gated:
        return available > 0
    resident = run.books.resident
    upstream = 0 if stage.first else resident[State.QUEUED] + resident[State.LEASED]
    return not upstream and not admission.can_grow(run)


def grant(run: Run, stage: Stage, worker: str, limit: int) -> list[Granted]:
    """Hand at most `limit` rows to `worker`."""
    rows = run.ready[stage.number].pop(limit)
    run.last_token += 1
    now = run.clock()
    granted: list[Granted] = []
    for row in rows:
        held = Held(row, stage.number, run.last_token, worker, now, now + run.spec.lease_ttl_s)
        row.held[stage.number] = held
        row.deliveries[stage.number] += 1
        row.since = now
        run.expiry.watch(held)
        run.refresh(row)
        granted.append(
            Granted(
                row.uid,
                held.token,
                row.deliveries[stage.number],
                row.group.task_key,
                tuple(row.frame_key(n) for n in run.stages.of_columns(stage.reads)),
            )
        )
    run.save(_groups(rows))
    return granted


def renew(run: Run, stage: Stage, worker: str, uids: Iterable[Uid]) -> list[Uid]:
    """Extend; returns what `worker` holds no longer. Deadlines are not stored, so nothing is."""
    deadline = run.clock() + run.spec.lease_ttl_s
    lost: list[Uid] = []
    for uid in uids:
        row = run.find(uid)
        held = row.held.get(stage.number) if row else None
        if held is None or held.worker != worker:
            lost.append(uid)
        else:
            held.deadline = deadline
            held.spared = False
    return lost


def checked(
    run: Run, stage: Stage, token_of: Mapping[Uid, int], writes: Sequence[RowWrite]
) -> list[PackedWrite]:
    """The writes that are still to be done; those done before under the same token are passed over.

    Raises:
        FencedError: with `uid`; somebody else has the row, or the lease ended.
        UserError: with `uid`; a column is wrong.
    """
    packed: list[PackedWrite] = []
    for write in {write.uid: write for write in writes}.values():
        if write.uid not in token_of:
            raise UserError(f"row {write.uid}: no lease token was given", uid=write.uid)
        row = run.find(write.uid)
        token = token_of[write.uid]
        if row is not None and row.done & stage.bit and row.writers[stage.number] == token:
            continue
        row = _held_row(run, stage, write.uid, token).row
        columns.check(write, stage, row.facts.num_tokens if row.facts else 0)
        packed.append(PackedWrite(row, write, pack(write.columns)))
    return packed


def write(run: Run, stage: Stage, writes: Sequence[PackedWrite]) -> None:
    """Add the columns."""
    for item in writes:
        row, group = item.row, item.row.group
        run.journal.put(Table.PAYLOAD, row.frame_key(stage.number), item.frame)
        held = row.held.pop(stage.number)
        row.writers[stage.number] = held.token
        row.done |= stage.bit
        row.nbytes += len(item.frame)
        run.open_bytes += len(item.frame)
        row.facts = item.write.facts or row.facts
        row.since = run.clock()
        if run.finished(row):
            group.ready += 1
        run.refresh(row)
        if run.finished(row):
            groups.finished_row(run, group)
    run.save(_groups(item.row for item in writes))


def fail(run: Run, stage: Stage, uid: Uid, token: int, outcome: Outcome, reason: str) -> None:
    """A worker gives a row up. Raises FencedError, with `uid`."""
    _redeliver(run, stage, _held_row(run, stage, uid, token), outcome, reason)


def release(run: Run, stage: Stage, token_of: Mapping[Uid, int]) -> None:
    """Rows come back untouched; those that the caller holds no longer are passed over."""
    rows: list[Row] = []
    for uid, token in token_of.items():
        row = run.find(uid)
        held = row.held.get(stage.number) if row else None
        if row is None or held is None or held.token != token:
            continue
        del row.held[stage.number]
        row.deliveries[stage.number] -= 1
        row.since = run.clock()
        run.refresh(row)
        rows.append(row)
    if rows:
        run.save(_groups(rows))


def expired(run: Run, held: Held) -> None:
    """The holder was silent for `lease_ttl_s`: the row goes to somebody else."""
    stage = next(stage for stage in run.stages if stage.number == held.stage)
    held.row.lost_by = held.worker
    _redeliver(run, stage, held, Outcome.INFRA_FAULT, EXPIRED)


def _redeliver(run: Run, stage: Stage, held: Held, outcome: Outcome, reason: str) -> None:
    row = held.row
    if row.deliveries[stage.number] >= run.spec.max_attempts:
        dead.bury(run, row, stage, outcome, reason)
        return
    del row.held[stage.number]
    row.since = run.clock()
    run.refresh(row)
    run.save([row.group])


def _held_row(run: Run, stage: Stage, uid: Uid, token: int) -> Held:
    row = run.find(uid)
    held = row.held.get(stage.number) if row else None
    if held is None or held.token != token:
        holder = f"{held.worker} holds it under token {held.token}" if held else "the lease ended"
        raise FencedError(
            f"row {uid}, stage {stage.name}: token {token} is fenced, {holder}", uid=uid
        )
    return held


def _groups(rows: Iterable[Row]) -> Iterable[Group]:
    return {row.group.number: row.group for row in rows}.values()
