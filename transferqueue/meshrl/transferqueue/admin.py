"""Operations for an operator of a running queue: export its store as of one commit, and audit it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from meshrl.contract.types import Ledger
from meshrl.transferqueue.operations.audit import Audit, audit, compare
from meshrl.transferqueue.operations.removal import StoredRun
from meshrl.transferqueue.queue import TransferQueue
from meshrl.transferqueue.store import Operation, Store


class QueueAdmin:
    """Exports and audits the store of a queue of this process."""

    def __init__(self, queue: TransferQueue, store: Store) -> None:
        self._queue = queue
        self._store = store

    def export(self) -> AsyncGenerator[Sequence[Operation], None]:
        """Every record as of one commit, see Store."""
        return self._store.export()

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
