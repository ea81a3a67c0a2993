"""The audit: checks stored bytes against checksums, the ledger against the rows, the rows against their payload.

    store ──export (one commit)──▶ META ──restore──▶ runs in RAM ──▶ ledger, needed payload ─┐
                                   PAYLOAD ──checksums──▶ stored payload ────────────────────┴─▶ problems

Three records that no code derives from each other must agree: the ledger (counters), the resident rows, and the audit
log (each transition with its task; see model/records.py).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence

from meshrl.contract.errors import CorruptError
from meshrl.contract.frames import strip_checksum
from meshrl.contract.types import Audit, Ledger, RunSpec
from meshrl.transferqueue import sampling
from meshrl.transferqueue.model.group import bits
from meshrl.transferqueue.model.records import ADMITTED
from meshrl.transferqueue.model.run import Run
from meshrl.transferqueue.model.waiting import Expiry
from meshrl.transferqueue.recovery import restore
from meshrl.transferqueue.store import CommitLog, Operation, Table
from meshrl.transferqueue.stores.memory import MemoryStore


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
