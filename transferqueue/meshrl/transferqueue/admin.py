"""Operations for an operator of a queue: export its store as of one commit, audit it, back it up and restore it.

The audit checks stored bytes against checksums, the ledger against the rows, the rows against their payload:

    store ──export (one commit)──▶ META ──restore──▶ runs in RAM ──▶ ledger, needed payload ─┐
                                   PAYLOAD ──checksums──▶ stored payload ────────────────────┴─▶ problems

Three records that no code derives from each other must agree: the ledger (counters), the resident rows, and the audit
log (each transition with its task; see model/records.py).

A backup is a disk store, from which any store can be filled:

    store ──export (one commit)──▶ FOLDER.partial ──synced, renamed──▶ FOLDER ──▶ an empty store

An interrupted backup leaves only a folder `.partial`, which no command takes for a backup. A restore writes the
payload first and all records in its last commit, so an interrupted one leaves an empty store.
"""

from __future__ import annotations

import asyncio
import shutil
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from meshrl.common.files import sync
from meshrl.contract.errors import (
    BusyError,
    ConflictError,
    CorruptError,
    NotFoundError,
    UserError,
)
from meshrl.contract.frames import strip_checksum
from meshrl.contract.types import Audit, Ledger, RunSpec, StoredRun
from meshrl.transferqueue import sampling
from meshrl.transferqueue.model.group import bits
from meshrl.transferqueue.model.records import ADMITTED
from meshrl.transferqueue.model.run import Run, restore
from meshrl.transferqueue.model.waiting import Expiry
from meshrl.transferqueue.queue import TransferQueue
from meshrl.transferqueue.several_processes import refusal
from meshrl.transferqueue.store import CommitLog, Operation, Store, Table
from meshrl.transferqueue.stores.disk import DiskStore
from meshrl.transferqueue.stores.memory import MemoryStore

EXPORTS: Final = 2
"""Copies of the store that there may be at once; each takes as much space as the store."""
PARTIAL = ".partial"
PICTURE = b"p"
"""How keys of pictures began that were not in the queue they were backed up from."""


class QueueAdmin:
    """Exports and audits the store of a queue of this process."""

    def __init__(self, queue: TransferQueue, store: Store) -> None:
        self._queue = queue
        self._store = store
        self._exports = 0

    async def export(self) -> AsyncGenerator[Sequence[Operation], None]:
        """Every record as of one commit, see Store. Raises BusyError while EXPORTS others are read."""
        if self._exports >= EXPORTS:
            raise BusyError(
                f"{self._exports} backups or audits of this queue run, each with a copy of the store: try again"
                " when one has ended"
            )
        self._exports += 1
        try:
            async with aclosing(self._store.export()) as pieces:
                async for piece in pieces:
                    yield piece
        finally:
            self._exports -= 1

    async def verify(self) -> Audit:
        """Audit the store; compare the ledgers of runs that did not change meanwhile with those of the queue."""
        before = await self._ledgers()
        async with aclosing(self.export()) as pieces:
            result = await audit(pieces)
        after = await self._ledgers()
        unchanged = {name for name in before if before[name] == after.get(name)}
        derived = {name: ledger for name, ledger in result.ledgers.items() if name in unchanged}
        if not result.problems:
            result.add_problems(compare(derived, {name: after[name] for name in unchanged}))
        return result

    async def runs(self) -> Sequence[StoredRun]:
        """All runs of the queue."""
        return self._queue.stored_runs()

    async def remove_run(self, run: str, *, force: bool) -> StoredRun:
        """Remove a run with everything that is stored of it; `force`: even one that services work on."""
        return await self._queue.remove_run(run, force=force)

    async def _ledgers(self) -> dict[str, Ledger]:
        return {name: await self._queue.ledger(name) for name in self._queue.runs}


async def audit(pieces: AsyncIterator[Sequence[Operation]]) -> Audit:
    """Check everything that a store exports. Wrong contents never raise; they are reported as problems."""
    result = Audit()
    meta: list[tuple[bytes, bytes]] = []
    payload: set[bytes] = set()
    broken: list[str] = []
    async for piece in pieces:
        for table, key, value in piece:
            assert value is not None
            result.nbytes += len(key) + len(value)
            if value or table is Table.PAYLOAD:
                try:
                    strip_checksum(value, f"{table} {key.hex()}")
                except CorruptError as error:
                    broken.append(str(error))
            if table is Table.META:
                meta.append((key, value))
            else:
                payload.add(key)
        # A large store takes a while, and the queue that serves it lives in this loop.
        await asyncio.sleep(0)
    result.records, result.values = len(meta), len(payload)
    result.add_problems(broken)
    try:
        runs = _restored(meta)
    except CorruptError as error:
        result.add_problems([str(error)])
        return result
    unclaimed = payload
    for run in runs.values():
        result.ledgers[run.name] = run.ledger.snapshot(run.name)
        result.add_problems(_ledger_problems(run))
        needed = run.needed_payload()
        result.add_problems(
            f"{what}: not stored" for key, what in needed.items() if key not in payload
        )
        unclaimed -= needed.keys()
    result.add_problems(f"payload {key.hex()} belongs to no row" for key in sorted(unclaimed))
    return result


def compare(derived: Mapping[str, Ledger], reported: Mapping[str, Ledger]) -> Iterator[str]:
    """Problems of the ledgers that a queue reports, against those derived from its store."""
    for name in sorted(derived.keys() | reported.keys()):
        if derived.get(name) != reported.get(name):
            yield f"run {name}: the queue reports {reported.get(name)}, its store {derived.get(name)}"


def _restored(meta: Sequence[tuple[bytes, bytes]]) -> dict[str, Run]:
    """Runs as a queue would open them, with a commit log that commits nothing and leases that never expire."""
    expiry = Expiry(lambda grant: None)

    async def nowhere() -> None:
        raise AssertionError("an audit commits nothing")

    def make(spec: RunSpec, number: int) -> Run:
        commit_log = CommitLog(MemoryStore(), nowhere)
        clock = asyncio.get_running_loop().time
        sampler = sampling.build("fifo")  # an audit takes nothing, in no order
        return Run(spec, number, sampler=sampler, commit_log=commit_log, expiry=expiry, clock=clock)

    try:
        return restore(meta, make)
    finally:
        expiry.clear()


def _ledger_problems(run: Run) -> Iterator[str]:
    ledger = run.ledger.snapshot(run.name)
    if not ledger.balanced:
        yield f"run {run.name}: the ledger does not balance: {ledger}"
    if any(count < 0 for exit_ in run.ledger.exits.values() for count in exit_.values()):
        yield f"run {run.name}: a negative number of rows left: {run.ledger.totals()}"
    if len(run.dead_letters) > sum(ledger.dead_lettered.values()):
        yield (
            f"run {run.name}: {len(run.dead_letters)} dead letters are stored, the ledger has"
            f" {sum(ledger.dead_lettered.values())}"
        )
    yield from _audit_log_problems(run)
    for group in run.groups.values():
        if group.task_id not in run.known_tasks:
            yield f"run {run.name}: task {group.task_id} is resident and was never admitted"
        for stage in run.stages.ordered:
            framed = {
                index
                for frame in group.frames
                if frame.stage == stage.number
                for index in frame.rows
            }
            missing = set(bits(group.present & group.done[stage.number])) - framed
            if missing:
                yield (
                    f"run {run.name}: rows {sorted(missing)} of {group.task_id} are in no frame of"
                    f" stage {stage.name}, which wrote them"
                )


def _audit_log_problems(run: Run) -> Iterator[str]:
    """The ledger against the sum of all transitions, and each task's resident rows against those of its own."""
    sums = run.audit_log.sums()
    totals = {exit_.value: left.total() for exit_, left in run.ledger.exits.items()}
    totals[ADMITTED] = run.ledger.admitted
    for exit_, rows in totals.items():
        if rows != sums[exit_]:
            yield f"run {run.name}: {exit_}: {rows} rows in the ledger, {sums[exit_]} in the audit log"
    resident = Counter({task: group.present.bit_count() for task, group in run.by_task.items()})
    wanted = run.audit_log.open_rows()
    if wanted is not None and wanted != +resident:
        for task in sorted(wanted.keys() | resident.keys()):
            if wanted[task] != resident[task]:
                yield f"run {run.name}: task {task} has {resident[task]} rows, {wanted[task]} in the audit log"


@dataclass(slots=True, kw_only=True)
class Copied:
    """How much a backup or a restore has copied."""

    records: int = 0
    values: int = 0
    """Entries of PAYLOAD."""
    nbytes: int = 0
    """Keys and values."""

    def add(self, piece: Sequence[Operation]) -> None:
        """Count `piece`."""
        for table, key, value in piece:
            self.records += table is Table.META
            self.values += table is Table.PAYLOAD
            self.nbytes += len(key) + len(value or b"")


async def back_up(pieces: AsyncIterator[Sequence[Operation]], folder: Path) -> Copied:
    """Write what a store exports to `folder`.

    Raises:
        ConflictError: `folder` exists. CapacityError: the disk is full. UserError: the folder cannot be created.
    """
    partial = _begin(folder)
    copied = Copied()
    store = DiskStore(partial, durability="none")
    try:
        await store.load()
        async for piece in pieces:
            await store.apply(piece)
            copied.add(piece)
    except BaseException:
        await store.close()
        shutil.rmtree(partial, ignore_errors=True)
        raise
    await store.close()
    partial.rename(folder)
    sync(folder.parent)
    return copied


def _begin(folder: Path) -> Path:
    if folder.exists():
        raise ConflictError(
            f"{folder} exists: a backup never overwrites anything; name another folder"
        )
    partial = folder.with_name(folder.name + PARTIAL)
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(mode=0o700, parents=True)  # it holds rows
    except OSError as error:
        raise UserError(f"cannot write a backup to {folder}: {error.strerror}") from error
    return partial


def opened(folder: Path) -> DiskStore:
    """The store of a backup; the caller loads and closes it.

    Raises:
        NotFoundError: none is there. UserError: a backup of several queue processes is there.
    """
    if all((folder / part / "data.mdb").is_file() for part in ("queue-0", "queue-1")):
        raise refusal(f"{folder} is a backup of several queue processes")
    if not (folder / "data.mdb").is_file():
        raise NotFoundError(f"{folder} holds no backup of a queue (no data.mdb in it)")
    return DiskStore(folder)


async def restore_backup(folder: Path, store: Store) -> Copied:
    """Fill an empty `store`, which is opened here and stays open.

    Raises:
        NotFoundError: `folder` holds no backup. ConflictError: the store holds a queue.
        UserError: the backup has another format or pictures of a store, or the store is owned.
        CorruptError: it cannot be read. CapacityError: it does not fit.
    """
    source = opened(folder)
    try:
        await source.load()
        if await store.load():
            raise ConflictError(
                "the store holds a queue already, and a restore never overwrites one: choose another"
                " run.dir, queue.path or queue.redis_prefix"
            )
        copied = Copied()
        records: list[Operation] = []
        async with aclosing(source.export()) as pieces:
            async for piece in pieces:
                copied.add(piece)
                records += [operation for operation in piece if operation.table is Table.META]
                payload = [operation for operation in piece if operation.table is Table.PAYLOAD]
                if any(operation.key.startswith(PICTURE) for operation in payload):
                    raise UserError(
                        f"{folder} has pictures of data.media_store, which no longer exists: commit 9121209e"
                        " restores it"
                    )
                if payload:
                    store.check_room(sum(len(operation.value or b"") for operation in payload))
                    await store.apply(payload)
        await store.apply(records)
    finally:
        await source.close()
    return copied
