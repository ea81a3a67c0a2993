"""What an operator may ask of a queue that serves: all of its store as of one moment, and an audit of it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from meshrl.contract.types import Ledger
from meshrl.transferqueue.operations.audit import Audit, audit, compare
from meshrl.transferqueue.queue import TransferQueue
from meshrl.transferqueue.store import Operation, Store


class QueueAdmin:
    """Belongs to the process that owns the queue."""

    def __init__(self, queue: TransferQueue, store: Store) -> None:
        self._queue = queue
        self._store = store

    def export(self) -> AsyncGenerator[Sequence[Operation], None]:
        """See Store."""
        return self._store.export()

    async def verify(self) -> Audit:
        """Audit the store, and compare it with what the queue tells of runs that stood still meanwhile."""
        before = await self._told()
        async with aclosing(self._store.export()) as pieces:
            found = await audit(pieces)
        after = await self._told()
        still = {name for name in before if before[name] == after.get(name)}
        derived = {name: ledger for name, ledger in found.ledgers.items() if name in still}
        if not found.problems:
            found.tell(compare(derived, {name: after[name] for name in still}))
        return found

    async def _told(self) -> dict[str, Ledger]:
        return {name: await self._queue.ledger(name) for name in self._queue.runs}
