"""Operations for an operator of a running queue: export its store as of one commit, and audit it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Final

from meshrl.contract.errors import WaitTimeoutError
from meshrl.contract.types import Audit, Ledger, StoredRun
from meshrl.transferqueue.audit import audit, compare
from meshrl.transferqueue.queue import TransferQueue
from meshrl.transferqueue.store import Operation, Store

PATIENCE_S: Final = 60.0
"""A reader of an export is given up when it is so much later than LEAST_RATE permits: the copy takes space."""
LEAST_RATE: Final = 1 << 20
"""Bytes a second that a reader of an export must take."""


class QueueAdmin:
    """Exports and audits the store of a queue of this process."""

    def __init__(self, queue: TransferQueue, store: Store) -> None:
        self._queue = queue
        self._store = store

    def export(self) -> AsyncGenerator[Sequence[Operation], None]:
        """Every record as of one commit, see Store, for a reader that is not slow, see `for_fast_readers`."""
        return for_fast_readers(self._store.export())

    async def verify(self) -> Audit:
        """Audit the store; compare the ledgers of runs that did not change meanwhile with those of the queue."""
        before = await self._ledgers()
        async with aclosing(self._store.export()) as pieces:
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


async def for_fast_readers(
    pieces: AsyncGenerator[Sequence[Operation], None],
    *,
    patience_s: float = PATIENCE_S,
    least_rate: float = LEAST_RATE,
) -> AsyncGenerator[Sequence[Operation], None]:
    """Hand on `pieces`, and close them under a reader that keeps them longer than a copy may last.

    The reader begins with `patience_s`. Each second that it holds a piece takes one from it, each `least_rate` bytes
    give one back, up to `patience_s`. At none, `pieces` are closed at once, whether the reader comes back or not.

    Raises:
        WaitTimeoutError: the reader was too slow.
    """
    loop = asyncio.get_running_loop()
    left_s = patience_s
    closing: list[asyncio.Task[None]] = []

    async def close() -> None:
        await pieces.aclose()

    def give_up() -> None:
        closing.append(loop.create_task(close(), name="give up an export"))

    try:
        async for piece in pieces:
            size = sum(len(each.key) + len(each.value or b"") for each in piece)
            handed_over = loop.time()
            timer = loop.call_later(left_s, give_up)
            try:
                yield piece
            finally:
                timer.cancel()
            if closing:
                raise WaitTimeoutError(
                    f"the export was given up: it was read at less than {least_rate / 2**20:g} MiB a second"
                    f" for {patience_s:g} s"
                )
            held_s = loop.time() - handed_over
            left_s = min(patience_s, left_s - held_s + size / least_rate)
    finally:
        await (closing[0] if closing else close())
