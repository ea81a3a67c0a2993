"""A transfer queue without a disk, in this process or behind gRPC, for tests of your own stages and trainers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from meshrl.contract.types import RunSpec
from meshrl.rpc.runtime import GrpcServer, ServerSettings
from meshrl.rpc.servicers import QueueServicer
from meshrl.transferqueue.queue import TransferQueue
from meshrl.transferqueue.stores.memory import MemoryStore


@asynccontextmanager
async def memory_queue(runs: Sequence[RunSpec] = ()) -> AsyncIterator[TransferQueue]:
    """The real queue on a store in memory, with `runs` open. Everything is gone when the block ends."""
    queue = await TransferQueue.open(MemoryStore())
    try:
        for spec in runs:
            await queue.open_run(spec)
        yield queue
    finally:
        await queue.close()


@asynccontextmanager
async def queue_service(runs: Sequence[RunSpec] = ()) -> AsyncIterator[str]:
    """`memory_queue` behind gRPC on a free port of loopback; yields its address, `host:port`."""
    async with memory_queue(runs) as queue:
        settings = ServerSettings(port=0, metrics_port=None)
        async with GrpcServer(settings, [QueueServicer(queue)]) as server:
            await server.ready()
            yield f"127.0.0.1:{server.port}"
