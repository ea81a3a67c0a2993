"""Connects to a queue, and refuses to work in a fork."""

from __future__ import annotations

import os
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from meshrl.contract.codec.compression import Mode
from meshrl.contract.errors import UserError
from meshrl.rpc.clients.base import SERVICE_RETRY_S
from meshrl.rpc.clients.queue import QueueClient
from meshrl.rpc.credentials import Credential

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


@asynccontextmanager
async def connected(
    address: str,
    retry_s: float,
    compression: Mode,
    credential: Credential | None = None,
) -> AsyncIterator[QueueClient]:
    """The queue at `address`."""
    require_no_fork()
    client = QueueClient(
        address,
        retry_s=retry_s,
        compression=compression,
        credential=credential,
    )
    _clients.add(client)
    async with client:
        yield client
