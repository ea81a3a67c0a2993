"""The audit: stored bytes against their checksums, the ledger derived anew from the rows, rows against their payload.

    store ──export (one commit)──▶ META ──restore──▶ runs in RAM ──▶ ledger, wanted payload ─┐
                                   PAYLOAD ──checksums──▶ payload that is there ─────────────┴─▶ problems

Three records that no code derives from each other must agree: the books (counters), the rows that are here, and the
trail (each transition with its task; see trail.py).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from meshrl.contract.errors import CorruptError
from meshrl.contract.frames import strip_checksum
from meshrl.contract.types import Ledger, RunSpec
from meshrl.transferqueue.commit_log import CommitLog
from meshrl.transferqueue.model.audit_log import ADMITTED
from meshrl.transferqueue.model.group import task_key
from meshrl.transferqueue.model.masks import bits
from meshrl.transferqueue.model.run import Run
from meshrl.transferqueue.model.waiting import Expiry
from meshrl.transferqueue.operations.recovery import restore
from meshrl.transferqueue.store import Operation, Table
from meshrl.transferqueue.stores.memory import MemoryStore

PROBLEMS_TOLD = 20
"""Problems of one kind that are named one by one; the rest are counted."""


@dataclass(slots=True, kw_only=True)
class Audit:
    """What was looked at, and what is wrong with it."""

    ledgers: dict[str, Ledger] = field(default_factory=dict)
    """Derived from the stored records, by run."""
    records: int = 0
    values: int = 0
    """In PAYLOAD."""
    nbytes: int = 0
    """Keys and values of both tables."""
    problems: list[str] = field(default_factory=list)

    def tell(self, problems: Iterable[str]) -> None:
        """Add problems of one kind."""
        found = list(problems)
        self.problems += found[:PROBLEMS_TOLD]
        if len(found) > PROBLEMS_TOLD:
            self.problems.append(f"… and {len(found) - PROBLEMS_TOLD} more like the last one")


async def audit(pieces: AsyncIterator[Sequence[Operation]]) -> Audit:
    """Look at everything that a store exports. Nothing in there makes it raise."""
    found = Audit()
    meta: list[tuple[bytes, bytes]] = []
    payload: set[bytes] = set()
    broken: list[str] = []
    async for piece in pieces:
        for table, key, value in piece:
            assert value is not None
            found.nbytes += len(key) + len(value)
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
    found.records, found.values = len(meta), len(payload)
    found.tell(broken)
    try:
        runs = _restored(meta)
    except CorruptError as error:
        found.tell([str(error)])
        return found
    unclaimed = payload
    for run in runs.values():
        found.ledgers[run.name] = run.ledger.snapshot(run.name)
        found.tell(_of_books(run))
        wanted = _wanted(run)
        found.tell(f"{what}: not stored" for key, what in wanted.items() if key not in payload)
        unclaimed -= wanted.keys()
    found.tell(f"payload {key.hex()} belongs to no row" for key in sorted(unclaimed))
    return found


def compare(derived: Mapping[str, Ledger], told: Mapping[str, Ledger]) -> Iterator[str]:
    """What a queue tells of its runs, against what its store says."""
    for name in sorted(derived.keys() | told.keys()):
        if derived.get(name) != told.get(name):
            yield f"run {name}: the queue tells {told.get(name)}, its store {derived.get(name)}"


def _restored(meta: Sequence[tuple[bytes, bytes]]) -> dict[str, Run]:
    """Runs as a queue would open them, with a commit log that commits nothing and leases that never end."""
    expiry = Expiry(lambda held: None)

    async def nowhere() -> None:
        raise AssertionError("an audit commits nothing")

    def make(spec: RunSpec, number: int) -> Run:
        commit_log = CommitLog(MemoryStore(), nowhere)
        clock = asyncio.get_running_loop().time
        return Run(spec, number, commit_log=commit_log, expiry=expiry, clock=clock)

    try:
        return restore(meta, make)
    finally:
        expiry.clear()


def _of_books(run: Run) -> Iterator[str]:
    ledger = run.ledger.snapshot(run.name)
    if not ledger.balanced:
        yield f"run {run.name}: the ledger does not balance: {ledger}"
    left = run.ledger.totals()
    if any(count < 0 for exit_ in run.ledger.exits.values() for count in exit_.values()):
        yield f"run {run.name}: less than nothing left: {left}"
    if len(run.dead_letters) > sum(ledger.dead_lettered.values()):
        yield (
            f"run {run.name}: {len(run.dead_letters)} dead letters are stored, the books know of"
            f" {sum(ledger.dead_lettered.values())}"
        )
    yield from _of_trail(run)
    for group in run.groups.values():
        if group.task_id not in run.known_tasks:
            yield f"run {run.name}: task {group.task_id} is resident and was never admitted"
        for stage in run.stages:
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


def _of_trail(run: Run) -> Iterator[str]:
    """The books against the sum of all transitions, and each task's rows against its own."""
    sums = run.audit_log.sums()
    books = {exit_.value: left.total() for exit_, left in run.ledger.exits.items()}
    books[ADMITTED] = run.ledger.admitted
    for way, rows in books.items():
        if rows != sums[way]:
            yield f"run {run.name}: {way}: {rows} rows in the books, {sums[way]} in the trail"
    here = Counter({task: group.present.bit_count() for task, group in run.by_task.items()})
    wanted = run.audit_log.open_rows()
    if wanted is not None and wanted != +here:
        for task in sorted(wanted.keys() | here.keys()):
            if wanted[task] != here[task]:
                yield f"run {run.name}: task {task} has {here[task]} rows, by the trail {wanted[task]}"


def _wanted(run: Run) -> dict[bytes, str]:
    """The payload that the run's records speak of, by key, with a name for people."""
    wanted: dict[bytes, str] = {}
    for group in run.groups.values():
        wanted[group.task_key] = f"task {run.name}/{group.task_id}"
        for frame in group.frames:
            stage = run.spec.stages[frame.stage].name
            wanted[group.frame_key(frame.number)] = (
                f"columns of {run.name}/{group.task_id}, {stage}"
            )
    for dead in run.dead_letters.values():
        wanted[task_key(run.number, dead.group)] = f"task of dead letter {dead.letter.uid}"
    for batch in run.batches.values():
        wanted[batch.manifest_key] = f"manifest of batch {batch.batch_id}"
    return wanted
