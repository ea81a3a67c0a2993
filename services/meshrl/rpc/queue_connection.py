"""Connects to the queue of a mesh (one process or several shards), and opens the stores behind it."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager

from meshrl.config.recipe import Recipe
from meshrl.contract.codec.compression import Mode
from meshrl.contract.errors import UserError
from meshrl.contract.ports import Queue
from meshrl.contract.precision import Precision
from meshrl.rpc.clients.base import SERVICE_RETRY_S
from meshrl.rpc.clients.patience import Patience
from meshrl.rpc.clients.queue import ClientOptions, QueueClient
from meshrl.rpc.clients.shard import ShardClient
from meshrl.rpc.service_context import ServiceContext
from meshrl.transferqueue import stores
from meshrl.transferqueue.sharding import ShardedQueue, ShardQueue
from meshrl.transferqueue.store import Store


@asynccontextmanager
async def connect_queue(
    addresses: str,
    *,
    retry_s: float = SERVICE_RETRY_S,
    compression: Mode = "auto",
    logprob_precision: Precision = "fp32",
    patience: Patience | None = None,
) -> AsyncIterator[Queue]:
    """The queue at `addresses`: `host:port`, or the addresses of all shards in their order, separated by commas.

    Shards that were added during a run need not be named: the first shard lists them.
    """
    shard_addresses = [address.strip() for address in addresses.split(",")]
    options: ClientOptions = {
        "retry_s": retry_s,
        "compression": compression,
        "patience": patience,
    }
    if len(shard_addresses) == 1:
        async with QueueClient(shard_addresses[0], **options) as queue:
            queue.logprob_precision = logprob_precision
            yield queue
        return
    async with AsyncExitStack() as stack:

        async def dial(address: str) -> ShardClient:
            return await stack.enter_async_context(ShardClient(address, **options))

        shards = [await dial(address) for address in shard_addresses]
        router = ShardedQueue(shards, shard_addresses, dial)
        stack.push_async_callback(router.close)
        router.logprob_precision = logprob_precision
        yield router


def connect_mesh_queue(
    recipe: Recipe, context: ServiceContext, patience: Patience | None = None
) -> AbstractAsyncContextManager[Queue]:
    """The queue of a service's own mesh, with the recipe's options. Calls wait while its disk is full."""
    return connect_queue(
        context.address_of("queue"),
        compression=recipe.queue.compression,
        logprob_precision=recipe.queue.logprob_precision,
        patience=patience or Patience(),
    )


def shard_number(recipe: Recipe, name: str) -> int:
    """The shard number of the service `name`: 1 for `queue-1`. Raises UserError."""
    shards = recipe.queue.shards
    number = re.search(r"-(\d+)$", name)
    if shards == 1 and number is None:
        return 0
    if number is None or int(number[1]) >= shards:
        names = f"queue-0 to queue-{shards - 1}" if shards > 1 else "queue or queue-0"
        raise UserError(f"{name} is no shard of queue.shards={shards}: want --name {names}")
    return int(number[1])


def build_store(recipe: Recipe, number: int) -> Store:
    """The store of a shard: directory `queue` for the first (or only) shard, `queue-1` for the second.

    Raises:
        UserError: the store's directory cannot be created.
    """
    config, path = recipe.queue, recipe.queue_path
    if number:
        path = path.with_name(f"{path.name}-{number}")
        prefix = config.redis_prefix and f"{config.redis_prefix}-{number}"
        config = config.model_copy(update={"path": path, "redis_prefix": prefix})
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"queue.path: {path}: {error.strerror}") from error
    return stores.build(config, path)


@asynccontextmanager
async def open_stored_queue(recipe: Recipe) -> AsyncIterator[Queue]:
    """Opens the queue's files in this process. For runs whose processes have ended."""
    async with AsyncExitStack() as stack:
        shards = []
        for number in range(recipe.queue.shards):
            shard = await ShardQueue.open(build_store(recipe, number))
            stack.push_async_callback(shard.close)
            shards.append(shard)
        yield shards[0] if len(shards) == 1 else ShardedQueue(shards)
