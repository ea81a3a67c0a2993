"""From the records of a store back to runs in RAM: what happens when a queue opens.

Keys of META, all with the run's number:  r spec · s state and books · g group with its rows · b batch · d dead letter
· n task that was admitted · x trail
· y trail, folded.  Keys of PAYLOAD:  t task · c frame of columns of one stage · m manifest of a batch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeAlias

from meshrl.contract.errors import CorruptError
from meshrl.contract.types import Json, RunSpec
from meshrl.transferqueue.model import policies, specs
from meshrl.transferqueue.model.group import Group
from meshrl.transferqueue.model.run import Run
from meshrl.transferqueue.operations import admission
from meshrl.transferqueue.operations.batches import TakenBatch
from meshrl.transferqueue.operations.dead_letters import DeadRow, keep
from meshrl.transferqueue.records import decode_record

MakeRun: TypeAlias = Callable[[RunSpec, int], Run]
Sorted: TypeAlias = dict[bytes, list[tuple[bytes, bytes]]]


def restore(items: Sequence[tuple[bytes, bytes]], make_run: MakeRun) -> dict[str, Run]:
    """The runs, by name. Leases go on under their tokens, each with a full time to live.

    Raises:
        CorruptError: a record is not what was written.
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


def _restore_run(number: int, records: Sorted, make_run: MakeRun) -> Run:
    run = make_run(specs.decode(_single(records[b"r"])), number)
    run.decode(_single(records[b"s"]))
    numbers = _values(records[b"n"])
    run.seen = {key[5:].decode(): n for (key, _), n in zip(records[b"n"], numbers, strict=True)}
    folded: Json = next(_values(records[b"y"]), {})
    keys = [key for key, _ in records[b"x"]]
    run.audit_log.restore(folded, list(zip(keys, _values(records[b"x"]), strict=True)))
    batches = {
        batch.number: batch
        for batch in (_batch(number, stored) for stored in _values(records[b"b"]))
    }
    run.batches = {batch.batch_id: batch for batch in batches.values()}
    for stored in _values(records[b"d"]):
        keep(run, DeadRow.restored(number, stored))
    for (key, _), stored in zip(records[b"g"], _values(records[b"g"]), strict=True):
        group, batch_number = Group.restored(run.name, number, stored, run.clock())
        if group.key != key:
            raise ValueError(f"record {key.hex()} is that of group {group.number}")
        _file(run, group, batches[batch_number] if batch_number >= 0 else None)
    kept = {*run.by_task, *(uid.task for uid in run.dead)}
    run.departed.extend(sorted(run.seen.keys() - kept, key=lambda task: run.seen[task]))
    admission.recount(run)
    return run


def _file(run: Run, group: Group, batch: TakenBatch | None) -> None:
    """Put a restored group where its record says that it was."""
    run.groups[group.number] = group
    run.by_task[group.task_id] = group
    run.open_load([group])
    group.batch = batch
    if batch is not None:
        batch.groups[group.number] = group
        run.in_batches += 1
    for held in group.grants:
        held.deadline = run.expiry.now() + run.spec.lease_ttl_s
        run.expiry.watch(held)
    run.refresh(group)
    if batch is None and (group.position >= 0 or policies.is_complete(run, group)):
        run.offer(group)


def _batch(run_number: int, stored: Json) -> TakenBatch:
    number, batch_id, step, epoch, settled = stored
    return TakenBatch(run_number, number, batch_id, step, epoch, settled)


def _values(items: Iterable[tuple[bytes, bytes]]) -> Iterator[Json]:
    return (decode_record(value, f"record {key.hex()}") for key, value in items)


def _single(items: Sequence[tuple[bytes, bytes]]) -> Json:
    (item,) = items
    return next(iter(_values([item])))
