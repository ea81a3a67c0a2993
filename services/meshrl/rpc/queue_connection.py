"""Connects to the queue of a mesh, and opens the store behind it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from meshrl.common.sockets import check_address
from meshrl.config.recipe import Recipe
from meshrl.config.run_record import refuse_several_queues
from meshrl.contract.codec.bulk import Mode
from meshrl.contract.errors import UserError
from meshrl.contract.ports import Queue
from meshrl.rpc.clients.base import SERVICE_RETRY_S, Patience
from meshrl.rpc.clients.queue import QueueClient
from meshrl.rpc.runtime import ServiceContext
from meshrl.transferqueue import stores
from meshrl.transferqueue.queue import TransferQueue
from meshrl.transferqueue.store import Store


@asynccontextmanager
async def connect_queue(
    address: str,
    *,
    retry_s: float = SERVICE_RETRY_S,
    compression: Mode = "auto",
    patience: Patience | None = None,
) -> AsyncIterator[Queue]:
    """The queue at `address`. Raises UserError unless that is `host:port` or `unix:/path`."""
    async with QueueClient(
        check_address(address),
        retry_s=retry_s,
        compression=compression,
        patience=patience,
    ) as queue:
        yield queue


def connect_mesh_queue(
    recipe: Recipe, context: ServiceContext, patience: Patience | None = None
) -> AbstractAsyncContextManager[Queue]:
    """The queue of a service's own mesh, with the recipe's options. Calls wait while its disk is full."""
    return connect_queue(
        context.address_of("queue"),
        compression=recipe.queue.compression,
        patience=patience or Patience(),
    )


def build_store(recipe: Recipe) -> Store:
    """The store of the recipe's queue, in the directory `queue` of its run unless it says otherwise.

    Raises:
        UserError: the store's directory cannot be created, or the run is on several queue processes.
    """
    refuse_several_queues(recipe.run.path)
    path = recipe.queue_path
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"queue.path: {path}: {error.strerror}") from error
    return stores.build(recipe.queue, path)


@asynccontextmanager
async def open_stored_queue(recipe: Recipe) -> AsyncIterator[Queue]:
    """Opens the queue's files in this process. For runs whose processes have ended."""
    queue = await TransferQueue.open(build_store(recipe))
    try:
        yield queue
    finally:
        await queue.close()
