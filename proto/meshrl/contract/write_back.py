"""Results on their way back to the queue: many that come one by one, in few writes.

    call ──write──┐
    call ──write──┼── GATHER_S after the last write, or once nobody is at work ──▶ one write of the queue
    call ──write──┘

consumes: rows of columns. waits for: company, then the queue. unblocked by: GATHER_S, a full write, the last call at
work; the queue. produces: one write for all that wait. One row costs its sender, the queue and the disk about what
fifty cost; the first after a pause goes at once.
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
"""From one write to the next while others are at work: little beside the seconds that sampling a row takes."""
MOST_ROWS = 256
"""Of one write."""

Refusal: TypeAlias = FencedError | UserError


@dataclass(slots=True, eq=False)
class _Given:
    """What one call brings."""

    token_of: Mapping[Uid, int]
    writes: dict[Uid, RowWrite]
    refused: dict[Uid, Refusal] = field(default_factory=dict)
    error: Exception | None = None


class WriteBack:
    """The writes of one stage to one run, at most one on its way at a time."""

    def __init__(self, queue: Queue, run: str, stage: str, *, alone: Callable[[], bool]) -> None:
        """`alone`: nobody is at work whose result might go along."""
        self._queue = queue
        self._run = run
        self._stage = stage
        self._alone = alone
        self._waiting: list[_Given] = []
        self._one_write = asyncio.Lock()
        self._go = asyncio.Event()
        self._next_at = 0.0

    async def write(
        self, token_of: Mapping[Uid, int], writes: Sequence[RowWrite]
    ) -> Mapping[Uid, Refusal]:
        """Return once each row is in the queue, or refused by it: those that are, and why.

        Who waits longest writes for all that wait. If it is cancelled meanwhile, the next one does.

        Raises:
            MeshError: the queue cannot be reached, or its disk is full and `queue` does not wait for space.
        """
        given = _Given(token_of, {row.uid: row for row in writes})
        self._waiting.append(given)
        if self._enough:
            self._go.set()
        try:
            async with self._one_write:
                while given in self._waiting:  # nobody took it along
                    await self._company()
                    await self._write(self._batch())
        finally:
            with suppress(ValueError):
                self._waiting.remove(given)
        if given.error is not None:
            raise given.error
        return given.refused

    @property
    def _enough(self) -> bool:
        """Nothing is gained by waiting longer."""
        return self._alone() or sum(len(given.writes) for given in self._waiting) >= MOST_ROWS

    async def _company(self) -> None:
        if not self._enough:
            self._go.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout_at(self._next_at):
                    await self._go.wait()
        self._next_at = asyncio.get_running_loop().time() + GATHER_S

    def _batch(self) -> list[_Given]:
        """Those that have waited longest."""
        batch: list[_Given] = []
        for given in self._waiting:
            batch.append(given)
            if sum(len(each.writes) for each in batch) >= MOST_ROWS:
                break
        return batch

    async def _write(self, batch: Sequence[_Given]) -> None:
        try:
            if len(batch) == 1 or not await self._accepted(batch):
                for given in batch:
                    await self._write_alone(given)
        except Exception as error:
            for given in batch:
                given.error = error
        for given in batch:
            self._waiting.remove(given)

    async def _accepted(self, batch: Sequence[_Given]) -> bool:
        """Whether the queue takes all rows at once; it takes all or none."""
        try:
            await self._send(batch)
        except (FencedError, UserError):
            return False
        return True

    async def _write_alone(self, given: _Given) -> None:
        """The rows of one call, without those that the queue refuses."""
        while given.writes:
            try:
                await self._send([given])
                return
            except (FencedError, UserError) as error:
                named = error.details.get("uid")
                uid = Uid.parse(named) if named else next(iter(given.writes))
                given.refused[uid] = error
                del given.writes[uid]

    async def _send(self, batch: Sequence[_Given]) -> None:
        token_of = {uid: given.token_of[uid] for given in batch for uid in given.writes}
        rows = [row for given in batch for row in given.writes.values()]
        await self._queue.write(self._run, self._stage, token_of, rows)
