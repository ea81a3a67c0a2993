"""The queue service: a store, the transfer queue on it, its servicers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from meshrl.config.recipe import Recipe
from meshrl.contract.errors import CorruptError, UserError
from meshrl.rpc.process_memory import collect_garbage_rarely, limit_malloc_arenas
from meshrl.rpc.queue_connection import build_store
from meshrl.rpc.queue_metrics import QueueCollector
from meshrl.rpc.runtime import GrpcServer, ServiceContext, Servicer
from meshrl.rpc.servicers import QueueAdminServicer, QueueServicer
from meshrl.transferqueue.admin import QueueAdmin
from meshrl.transferqueue.queue import TransferQueue


async def run(recipe: Recipe, context: ServiceContext) -> None:
    """Serve until stopped. The store is closed last, when no call can write to it any more.

    Raises:
        UserError: the store's directory cannot be made, or the store is damaged: the same command would fail again.
        OwnerLostError: another queue took the store over.
    """
    collect_garbage_rarely()
    limit_malloc_arenas()
    store = build_store(recipe)
    try:
        queue = await TransferQueue.open(
            store,
            samplers=[recipe.queue.sampler],
        )
    except CorruptError as error:
        raise UserError(error.message) from error
    try:
        servicers: list[Servicer] = [
            QueueServicer(queue),
            QueueAdminServicer(QueueAdmin(queue, store)),
        ]
        async with GrpcServer(context.settings, servicers) as server, _owning(queue, server):
            server.registry.register(QueueCollector(queue, store))
            await server.ready()
            await server.until_stopped()
            queue.end_no_lease()
    finally:
        await queue.close()


@asynccontextmanager
async def _owning(queue: TransferQueue, server: GrpcServer) -> AsyncIterator[None]:
    """Stop serving when another queue has taken the store over, and say so."""

    async def watch() -> None:
        error = await queue.lost()
        server.stop()
        raise error

    watching = asyncio.create_task(watch(), name="queue-owner")
    try:
        yield
    finally:
        if watching.done():
            watching.result()
        watching.cancel()
