"""A queue that writes down every question before it is asked and every answer before it is used."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias

import xxhash

from meshrl.contract.errors import CapacityError, MeshError
from meshrl.contract.ports import Queue
from meshrl.contract.types import Batch, Columns, Lease, Ledger, RowWrite, Task, Uid

from .events import EventLog
from .plan import STAGES

Facts: TypeAlias = dict[str, Any]

RETRY_S: Final = 0.1
"""A full disk is asked again: whoever met it did nothing wrong."""


def content(columns: Columns, names: Sequence[str]) -> str:
    """Digest of the named columns: names, dtypes, shapes and bytes."""
    digest = xxhash.xxh3_128()
    for name in sorted(names):
        column = columns[name]
        digest.update(f"{name} {column.dtype.str} {column.shape} ".encode())
        digest.update(column.tobytes())
    return digest.hexdigest()


def _admit(run: str, tasks: Sequence[Task], **rest: Any) -> Facts:
    return {"tasks": [task.task_id for task in tasks]}


def _write(run: str, stage: str, token_of: Mapping[Uid, int], rows: Sequence[RowWrite]) -> Facts:
    row_facts = [
        [str(row.uid), token_of[row.uid], content(row.columns, list(row.columns))] for row in rows
    ]
    return {"stage": stage, "rows": row_facts}


def _lease(runs: Sequence[str], stage: str, **rest: Any) -> Facts:
    return {"stage": stage, "worker": rest["worker"]}


def _leased(lease: Lease) -> Facts:
    return {"rows": [[str(row.uid), row.token] for row in lease.rows]}


def _taken(batch: Batch) -> Facts:
    return {"rows": [[str(row.uid), row.group, row.oldest.step] for row in batch.rows]}


def _fetch(run: str, uids: Sequence[Uid], columns: Sequence[str]) -> Facts:
    return {"uids": [str(uid) for uid in uids]}


def _fetched(rows: Sequence[Columns]) -> Facts:
    return {"rows": [{stage.name: content(row, stage.writes) for stage in STAGES} for row in rows]}


def _filter(run: str, *, epoch: int, uids: Sequence[Uid], reason: str) -> Facts:
    return {"uids": [str(uid) for uid in uids], "reason": reason}


def _step(run: str, **facts: Any) -> Facts:
    return {name: facts[name] for name in ("epoch", "step", "batch_id") if name in facts}


def ledger_facts(ledger: Ledger) -> Facts:
    """A ledger as JSON, without zeros."""

    def counts(part: Mapping[str, int]) -> dict[str, int]:
        return {name: count for name, count in part.items() if count}

    return {
        "admitted": ledger.admitted,
        "trained": ledger.trained,
        "filtered": counts(ledger.filtered),
        "stale": counts(ledger.stale),
        "dead_lettered": counts(ledger.dead_lettered),
        "resident": counts(ledger.resident),
    }


def _nothing(*args: Any, **rest: Any) -> Facts:
    return {}


TOLD: Final[Mapping[str, tuple[Callable[..., Facts], Callable[[Any], Facts]]]] = {
    "admit": (_admit, lambda added: {"added": added}),
    "lease": (_lease, _leased),
    "write_rows": (_write, _nothing),
    "take": (_step, _taken),
    "fetch_rows": (_fetch, _fetched),
    "filter": (_filter, _nothing),
    "settle": (_step, _nothing),
    "commit": (_step, _nothing),
    "rewind": (_step, lambda rows: {"rows": rows}),
    "acquire": (_nothing, lambda state: {"epoch": state.epoch}),
    "ledger": (_nothing, ledger_facts),
    "close_feed": (_nothing, _nothing),
}
"""Records of a verb's question and answer, by verb. No other verb begins or ends a row's life."""

_OTHERS: Final = (_nothing, _nothing)


class RecordedQueue:
    """A Queue. Asks again for as long as the disk is full."""

    def __init__(self, queue: Queue, log: EventLog) -> None:
        self._queue = queue
        self._log = log

    def __getattr__(self, verb: str) -> Any:
        method = getattr(self._queue, verb)
        asked, answered = TOLD.get(verb, _OTHERS)

        async def call(*args: Any, **rest: Any) -> Any:
            while True:
                name = self._log.begin(verb, **asked(*args, **rest))
                try:
                    answer = await method(*args, **rest)
                except CapacityError as error:
                    self._log.end(name, error=error.code)
                    await asyncio.sleep(RETRY_S)
                except MeshError as error:
                    self._log.end(name, error=error.code)
                    raise
                else:
                    self._log.end(name, **answered(answer))
                    return answer

        return call
