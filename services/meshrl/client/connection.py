"""Connects to a queue or to all its shards, and refuses to work in a fork."""

from __future__ import annotations

import os
import weakref
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Final, TypeVar

from meshrl.contract.codec.compression import Mode
from meshrl.contract.errors import UserError
from meshrl.contract.ports import Queue
from meshrl.rpc.clients.base import SERVICE_RETRY_S
from meshrl.rpc.clients.queue import ClientOptions, QueueClient
from meshrl.rpc.credentials import Credential

Client = TypeVar("Client", bound=QueueClient)

RETRY_S: Final = SERVICE_RETRY_S
"""Seconds that a restart of the queue may take before calls fail with UnavailableError."""

# Clients that are not freed yet, closed or not: gRPC ends its threads when the last channel is freed, not when it is
# closed.
_clients: weakref.WeakSet[QueueClient] = weakref.WeakSet()
_forked_beside_a_client = False


def _after_fork() -> None:
    global _forked_beside_a_client
    _forked_beside_a_client = _forked_beside_a_client or len(_clients) > 0
    _clients.clear()


os.register_at_fork(after_in_child=_after_fork)


def require_no_fork() -> None:
    """Raises UserError in a process that was forked while a connection existed: gRPC would hang there."""
    if _forked_beside_a_client:
        raise UserError(
            f"process {os.getpid()} was forked from one with a queue connection, and gRPC does not survive that:"
            ' start it with "spawn" or "forkserver", or close and drop the connection before the fork'
        )


def check_address(address: str) -> str:
    """Return `address` unchanged. Raises UserError unless it is `host:port` or `unix:/path`."""
    host, colon, port = address.rpartition(":")
    if address.startswith(("unix:", "unix-abstract:")):
        return address
    if not (colon and host and port.isdecimal() and 0 < int(port) < 65536):
        raise UserError(f"{address!r} is no address of a queue; want host:port or unix:/path")
    return address


@asynccontextmanager
async def connected(
    addresses: Sequence[str],
    retry_s: float,
    compression: Mode,
    credential: Credential | None = None,
) -> AsyncIterator[Queue]:
    """The queue at one address, or the sharded queue at several. All clients must use the same order."""
    require_no_fork()
    options: ClientOptions = {
        "retry_s": retry_s,
        "compression": compression,
        "credential": credential,
    }
    async with AsyncExitStack() as stack:
        if len(addresses) == 1:
            yield await stack.enter_async_context(_registered(QueueClient(addresses[0], **options)))
            return
        # Imported here, so that clients of a queue without shards need not load the router.
        from meshrl.rpc.clients.shard import ShardClient
        from meshrl.transferqueue.sharding import ShardedQueue

        async def dial(address: str) -> ShardClient:
            client = ShardClient(address, **options)
            return await stack.enter_async_context(_registered(client))

        router = ShardedQueue([await dial(address) for address in addresses], addresses, dial)
        stack.push_async_callback(router.close)
        yield router


def _registered(client: Client) -> Client:
    _clients.add(client)
    return client
