"""An operator's questions to a queue: over gRPC while it runs, on its store when it does not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from meshrl.cli.find_mesh import RETRY_S, Mesh
from meshrl.contract.types import Audit
from meshrl.launcher.address_book import run_lock
from meshrl.rpc.clients.operators import QueueAdminClient
from meshrl.rpc.queue_connection import build_store
from meshrl.transferqueue.admin import QueueAdmin, audit
from meshrl.transferqueue.queue import TransferQueue
from meshrl.transferqueue.store import Operation, Store

Answer = TypeVar("Answer")


class StoredQueue:
    """A store that no queue serves: what is broken in it must not keep it from being looked at."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def export(self) -> AsyncGenerator[Sequence[Operation], None]:
        """Everything that is stored, as of one commit."""
        return self._store.export()

    async def verify(self) -> Audit:
        """Look at all of it."""
        async with aclosing(self._store.export()) as pieces:
            return await audit(pieces)


async def ask_store(store: Store, question: Callable[[StoredQueue], Awaitable[Answer]]) -> Answer:
    """One conversation with a store, opened and closed here."""
    try:
        await store.load()
        return await question(StoredQueue(store))
    finally:
        await store.close()


def ask_operator(
    mesh: Mesh, question: Callable[[Any], Awaitable[Answer]], *, of_runs: bool = False
) -> Answer:
    """One conversation with the queue of `mesh`: with its client, or where it does not run with a StoredQueue.

    A question `of_runs` is put to a QueueAdmin there, for which the store must be sound.
    """

    async def ask() -> Answer:
        if mesh.stopped is None:
            async with QueueAdminClient(mesh.queue, retry_s=RETRY_S) as client:
                return await question(client)
        recipe = mesh.stopped
        with run_lock(recipe.run.path):
            store = build_store(recipe)
            if not of_runs:
                return await ask_store(store, question)
            queue = await TransferQueue.open(store, samplers=[recipe.queue.sampler])
            try:
                return await question(QueueAdmin(queue, store))
            finally:
                await queue.close()

    return asyncio.run(ask())
