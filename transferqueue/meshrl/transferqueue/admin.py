"""Operations for an operator of a running queue: export its store as of one commit, and audit it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractContextManager, aclosing, nullcontext
from typing import TYPE_CHECKING

from meshrl.contract.types import Ledger
from meshrl.transferqueue.operations.audit import Audit, audit, compare, exported
from meshrl.transferqueue.operations.removal import StoredRun
from meshrl.transferqueue.queue import TransferQueue
from meshrl.transferqueue.store import Operation, Store

if TYPE_CHECKING:
    from meshrl.contract.picture_store import PictureFolders
    from meshrl.transferqueue.operations.pictures import PictureRemover


class QueueAdmin:
    """Exports and audits the store of a queue of this process."""

    def __init__(
        self, queue: TransferQueue, store: Store, pictures: PictureRemover | None = None
    ) -> None:
        self._queue = queue
        self._store = store
        self._pictures = pictures

    async def export(self) -> AsyncGenerator[Sequence[Operation], None]:
        """Every record as of one commit, see Store, and the pictures of its tasks that are not in the store."""
        with self._all_pictures():
            async with aclosing(exported(self._store, self._folders)) as pieces:
                async for piece in pieces:
                    yield piece

    @property
    def _folders(self) -> PictureFolders | None:
        return self._pictures.folders if self._pictures else None

    def _all_pictures(self) -> AbstractContextManager[None]:
        """Tasks that leave after a commit take no picture of it along."""
        return self._pictures.held() if self._pictures else nullcontext()

    async def verify(self) -> Audit:
        """Audit the store; compare the ledgers of runs that did not change meanwhile with those of the queue."""
        before = await self._ledgers()
        with self._all_pictures():
            async with aclosing(self._store.export()) as pieces:
                result = await audit(pieces, self._folders)
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
        """See TransferQueue."""
        return await self._queue.remove_run(run, force=force)

    async def _ledgers(self) -> dict[str, Ledger]:
        return {name: await self._queue.ledger(name) for name in self._queue.runs}
