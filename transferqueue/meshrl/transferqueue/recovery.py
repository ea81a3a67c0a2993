"""Rebuilds the runs in RAM from the records of a store, when a queue opens.

Keys of META, each with the run's number:  r spec · s state and ledger · g group with its rows · b batch
· d dead letter · n task that was admitted · x audit log · y sum of older audit log records.
Keys of PAYLOAD:  t task · c frame of columns of one stage · m manifest of a batch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeAlias

from meshrl.contract.errors import CorruptError
from meshrl.contract.types import Json, RunSpec
from meshrl.transferqueue.model.group import Group
from meshrl.transferqueue.model.records import DeadRow, TakenBatch
from meshrl.transferqueue.model.run import Run
from meshrl.transferqueue.model.specs import decode_spec
from meshrl.transferqueue.store import decode_record

MakeRun: TypeAlias = Callable[[RunSpec, int], Run]
Sorted: TypeAlias = dict[bytes, list[tuple[bytes, bytes]]]


def restore(items: Sequence[tuple[bytes, bytes]], make_run: MakeRun) -> dict[str, Run]:
    """The runs by name. Leases go on under their tokens, each with a full time to live.

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


def _restore_run(number: int, records: Sorted, make_run: MakeRun) -> Run:
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
