"""Gathers results that come one by one into few writes to the queue.

    call ──write──┐
    call ──write──┼── GATHER_S after the last write, or once no call works ──▶ one write of the queue
    call ──write──┘

consumes: rows of columns. waits for: more results, then the queue. unblocked by: GATHER_S, a full write, the end of
the last working call; the queue. produces: one write for all that wait. Writing one row costs its sender, the queue
and the disk about as much as writing fifty; the first one after a pause goes at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeAlias

from meshrl.contract.errors import FencedError, UserError
from meshrl.contract.ports import Queue
from meshrl.contract.types import RowWrite, Uid

GATHER_S = 0.1
"""Seconds between two writes while other calls work: short beside the seconds that sampling a row takes."""
MOST_ROWS = 256
"""Rows of one write, at most."""

Refusal: TypeAlias = FencedError | UserError


@dataclass(slots=True, eq=False)
class _PendingWrite:
    """The results of one call."""

    token_of: Mapping[Uid, int]
    writes: dict[Uid, RowWrite]
    refused: dict[Uid, Refusal] = field(default_factory=dict)
    error: Exception | None = None


class WriteBack:
    """The writes of one stage to one run; at most one is in flight."""

    def __init__(self, queue: Queue, run: str, stage: str, *, alone: Callable[[], bool]) -> None:
        """`alone` says that no call works whose result might join the next write."""
        self._queue = queue
        self._run = run
        self._stage = stage
        self._alone = alone
        self._waiting: list[_PendingWrite] = []
        self._one_write = asyncio.Lock()
        self._go = asyncio.Event()
        self._next_at = 0.0

    async def write(
        self, token_of: Mapping[Uid, int], writes: Sequence[RowWrite]
    ) -> Mapping[Uid, Refusal]:
        """Return once each row is in the queue or was refused by it; the refused ones, with the error of each.

        The call that waits longest writes for all that wait. If it is cancelled meanwhile, the next one does.

        Raises:
            MeshError: the queue cannot be reached, or its disk is full and `queue` does not wait for space.
        """
        pending = _PendingWrite(token_of, {row.uid: row for row in writes})
        self._waiting.append(pending)
        if self._enough:
            self._go.set()
        try:
            async with self._one_write:
                while pending in self._waiting:  # no other call has written it
                    await self._gather()
                    await self._write(self._batch())
        finally:
            with suppress(ValueError):
                self._waiting.remove(pending)
        if pending.error is not None:
            raise pending.error
        return pending.refused

    @property
    def _enough(self) -> bool:
        """Waiting longer gains nothing."""
        return self._alone() or sum(len(pending.writes) for pending in self._waiting) >= MOST_ROWS

    async def _gather(self) -> None:
        if not self._enough:
            self._go.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout_at(self._next_at):
                    await self._go.wait()
        self._next_at = asyncio.get_running_loop().time() + GATHER_S

    def _batch(self) -> list[_PendingWrite]:
        """The pending writes that have waited longest."""
        batch: list[_PendingWrite] = []
        for pending in self._waiting:
            batch.append(pending)
            if sum(len(each.writes) for each in batch) >= MOST_ROWS:
                break
        return batch

    async def _write(self, batch: Sequence[_PendingWrite]) -> None:
        try:
            if len(batch) == 1 or not await self._accepted(batch):
                for pending in batch:
                    await self._write_alone(pending)
        except Exception as error:
            for pending in batch:
                pending.error = error
        for pending in batch:
            self._waiting.remove(pending)

    async def _accepted(self, batch: Sequence[_PendingWrite]) -> bool:
        """Whether the queue takes all rows at once; it takes all or none."""
        try:
            await self._send(batch)
        except (FencedError, UserError):
            return False
        return True

    async def _write_alone(self, pending: _PendingWrite) -> None:
        """The rows of one call, without those that the queue refuses."""
        while pending.writes:
            try:
                await self._send([pending])
                return
            except (FencedError, UserError) as error:
                named = error.details.get("uid")
                uid = Uid.parse(named) if named else next(iter(pending.writes))
                pending.refused[uid] = error
                del pending.writes[uid]

    async def _send(self, batch: Sequence[_PendingWrite]) -> None:
        token_of = {uid: pending.token_of[uid] for pending in batch for uid in pending.writes}
        rows = [row for pending in batch for row in pending.writes.values()]
        await self._queue.write(self._run, self._stage, token_of, rows)
