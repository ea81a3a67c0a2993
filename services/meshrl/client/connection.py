"""A connection to one queue, or to the shards of one, that does not outlive a fork unnoticed."""

from __future__ import annotations

import os
import weakref
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Final, TypeVar

from meshrl.contract.codec.compression import Mode
from meshrl.contract.errors import UserError
from meshrl.contract.ports import Queue
from meshrl.rpc.clients.peer import STAGE_PATIENCE_S
from meshrl.rpc.clients.queue import QueueClient

Wire = TypeVar("Wire", bound=QueueClient)

PATIENCE_S: Final = STAGE_PATIENCE_S
"""How long a restart of the queue may take before calls fail with UnavailableError."""

# Wires that live, closed or not: gRPC ends its threads when the last channel is freed, not when it is closed.
_living: weakref.WeakSet[QueueClient] = weakref.WeakSet()
_forked_beside_a_wire = False


def _after_fork() -> None:
    global _forked_beside_a_wire
    _forked_beside_a_wire = _forked_beside_a_wire or len(_living) > 0
    _living.clear()


os.register_at_fork(after_in_child=_after_fork)


def require_no_fork() -> None:
    """Raises UserError in a process that was forked beside a connection: gRPC would hang there."""
    if _forked_beside_a_wire:
        raise UserError(
            f"process {os.getpid()} was forked from one with a queue connection, and gRPC does not survive that:"
            ' start it with "spawn" or "forkserver", or close and drop the connection before the fork'
        )


def check_address(address: str) -> str:
    """`host:port` or `unix:/path`, as it came. Raises UserError."""
    host, colon, port = address.rpartition(":")
    if address.startswith(("unix:", "unix-abstract:")):
        return address
    if not (colon and host and port.isdecimal() and 0 < int(port) < 65536):
        raise UserError(f"{address!r} is no address of a queue; want host:port or unix:/path")
    return address


@asynccontextmanager
async def connected(
    addresses: Sequence[str], patience_s: float, compression: Mode
) -> AsyncIterator[Queue]:
    """The queue at one address, or the sharded one at several (the order is the same for everybody)."""
    require_no_fork()
    async with AsyncExitStack() as stack:
        if len(addresses) == 1:
            yield await stack.enter_async_context(
                _living_wire(
                    QueueClient(addresses[0], patience_s=patience_s, compression=compression)
                )
            )
            return
        # Only who has shards loads the router.
        from meshrl.rpc.clients.shard import ShardClient
        from meshrl.transferqueue.sharding.router import ShardedQueue

        async def dial(address: str) -> ShardClient:
            wire = ShardClient(address, patience_s=patience_s, compression=compression)
            return await stack.enter_async_context(_living_wire(wire))

        router = ShardedQueue([await dial(address) for address in addresses], addresses, dial)
        stack.push_async_callback(router.close)
        yield router


def _living_wire(wire: Wire) -> Wire:
    _living.add(wire)
    return wire
