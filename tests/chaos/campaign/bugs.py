"""Queues that are wrong on purpose, each in one way, once or a few times: what the history checker is tested with."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from meshrl.contract.errors import FencedError
from meshrl.contract.frames import Frame, pack
from meshrl.contract.ports import Queue
from meshrl.contract.types import Batch, Lease, Ledger, RowBlock, Task


class Wrong:
    """Passes everything on. `due` is true once, at the fifth opportunity."""

    write_rows = Queue.write_rows
    fetch_rows = Queue.fetch_rows

    def __init__(self, queue: Queue) -> None:
        self.queue = queue
        self._chances = 0

    def __getattr__(self, verb: str) -> Any:
        return getattr(self.queue, verb)

    async def write(self, run: str, stage: str, blocks: Sequence[RowBlock]) -> None:
        await self.queue.write(run, stage, blocks)

    async def fetch(
        self, run: str, blocks: Sequence[RowBlock], columns: Sequence[str], **rest: Any
    ) -> Sequence[RowBlock]:
        return await self.queue.fetch(run, blocks, columns, **rest)

    def due(self) -> bool:
        self._chances += 1
        return self._chances == 5


class DropsAWrite(Wrong):
    """Acknowledges a write and forgets it."""

    async def write(self, run: str, stage: str, blocks: Sequence[RowBlock]) -> None:
        if stage != "reward" or not self.due():
            await self.queue.write(run, stage, blocks)


class TakesFencedWrites(Wrong):
    """Lets a lease expire under its holder, and acknowledges the write that comes too late."""

    async def write(self, run: str, stage: str, blocks: Sequence[RowBlock]) -> None:
        if stage == "rollout" and self.due():
            ledger = await self.queue.run_state(run)
            await asyncio.sleep(3 * ledger.spec.lease_ttl_s)
            try:
                await self.queue.write(run, stage, blocks)
            except FencedError:
                return
        await self.queue.write(run, stage, blocks)


class GrantsTwice(Wrong):
    """Gives one lease to two workers, tokens and all."""

    async def lease(self, runs: Sequence[str], stage: str, **rest: Any) -> Lease:
        lease: Lease = await self.queue.lease(runs, stage, **rest)
        if stage == "rollout":
            if self.due():
                return self._before
            self._before = lease
        return lease


class TrainsTwice(Wrong):
    """Delivers a batch that was delivered before instead of the next one."""

    _before: Batch | None = None

    async def take(self, run: str, **rest: Any) -> Batch:
        batch: Batch = await self.queue.take(run, **rest)
        if self._before and batch.batch_id != self._before.batch_id and self.due():
            return replace(self._before, batch_id=batch.batch_id, step=batch.step)
        self._before = batch
        return batch


class ResurrectsACommittedRow(Wrong):
    """Offers a worker a row that was trained and committed."""

    def __init__(self, queue: Queue) -> None:
        super().__init__(queue)
        self._first: Lease | None = None
        self._committed = False

    async def commit(self, run: str, *, epoch: int, step: int) -> None:
        await self.queue.commit(run, epoch=epoch, step=step)
        self._committed = step >= 3

    async def lease(self, runs: Sequence[str], stage: str, **rest: Any) -> Lease:
        lease: Lease = await self.queue.lease(runs, stage, **rest)
        if stage != "rollout":
            return lease
        if self._first is None:
            self._first = lease
        if self._committed and self.due():
            ghosts = tuple(replace(g, token=g.token + 10**6) for g in self._first.blocks)
            return replace(lease, blocks=(*lease.blocks, *ghosts))
        return lease


class AltersContent(Wrong):
    """Flips a bit of what was stored."""

    async def fetch(
        self, run: str, blocks: Sequence[RowBlock], columns: Sequence[str], **named: Any
    ) -> Sequence[RowBlock]:
        first, *rest = await self.queue.fetch(run, blocks, columns, **named)
        if self.due():
            rows = first.columns()
            tokens: Any = rows[0]["tokens"] ^ np.int32(1)
            frame = pack([{**rows[0], "tokens": tokens}, *rows[1:]])
            first = replace(first, frames=(Frame(frame, tuple(range(len(rows)))),))
        return [first, *rest]


class ForgetsABatch(Wrong):
    """Answers a take that is asked again in another order."""

    async def take(self, run: str, **rest: Any) -> Batch:
        batch: Batch = await self.queue.take(run, **rest)
        half = len(batch.groups) // 2
        self._chances += 1
        if self._chances % 2:
            return batch
        return replace(batch, groups=(*batch.groups[half:], *batch.groups[:half]))


class LosesATask(Wrong):
    """Acknowledges a task and never admits it."""

    async def admit(self, run: str, tasks: Sequence[Task], *, cursor: str, wait_s: float) -> int:
        if self.due():
            await self.queue.admit(run, tasks[1:], cursor=cursor, wait_s=wait_s)
            return len(tasks)
        return await self.queue.admit(run, tasks, cursor=cursor, wait_s=wait_s)


class Miscounts(Wrong):
    """Counts one row too many as trained, and one too few as resident."""

    async def ledger(self, run: str) -> Ledger:
        ledger: Ledger = await self.queue.ledger(run)
        resident = dict(ledger.resident)
        resident["queued"] = resident.get("queued", 0) - 1
        return replace(ledger, trained=ledger.trained + 1, resident=resident)


class MixesUpReplays(Wrong):
    """Gives a trainer that went back the groups of a batch in another order."""

    _rewound = False

    async def rewind(self, run: str, *, epoch: int, step: int) -> int:
        rows = await self.queue.rewind(run, epoch=epoch, step=step)
        self._rewound = rows > 0
        return rows

    async def take(self, run: str, **rest: Any) -> Batch:
        batch: Batch = await self.queue.take(run, **rest)
        half = len(batch.groups) // 2
        if not self._rewound:
            return batch
        return replace(batch, groups=(*batch.groups[half:], *batch.groups[:half]))


BUGS: Mapping[str, tuple[type[Wrong], str]] = {
    "drops-a-write": (DropsAWrite, "fencing"),
    "takes-fenced-writes": (TakesFencedWrites, "fencing"),
    "grants-twice": (GrantsTwice, "grants"),
    "trains-twice": (TrainsTwice, "lineage"),
    "resurrects-a-committed-row": (ResurrectsACommittedRow, "exits"),
    "alters-content": (AltersContent, "content"),
    "forgets-a-batch": (ForgetsABatch, "batches"),
    "mixes-up-replays": (MixesUpReplays, "replays"),
    "loses-a-task": (LosesATask, "lineage"),
    "miscounts": (Miscounts, "ledger"),
}
"""The queue, and the rule of history.py that must detect it, by name."""


def planted(name: str, queue: Queue) -> Queue:
    """The queue, wrong in the way of that name; the empty name is no bug."""
    wrong: Any = BUGS[name][0](queue) if name else queue
    return wrong  # type: ignore[no-any-return]
