"""The queue contract through a router over two shards: in this process, each behind a gRPC server of its own, and
with a third shard that comes while the test goes on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from meshrl.contract.ports import Queue
from meshrl.rpc.clients.shard import ShardClient
from meshrl.rpc.runtime import GrpcServer, ServerSettings
from meshrl.rpc.servicers import QueueServicer
from meshrl.rpc.servicers.shard import ShardServicer
from meshrl.testing.contract.queue_batch_suite import QueueBatchSuite
from meshrl.testing.contract.queue_repeat_suite import QueueRepeatSuite
from meshrl.testing.contract.queue_suite import QueueSuite
from meshrl.transferqueue import stores
from meshrl.transferqueue.config import QueueConfig
from meshrl.transferqueue.sharding import Shard, ShardedQueue, ShardQueue

NAMES = ("queue-0", "queue-1", "queue-2")
GROWS_AT = 4
"""The call before which the third shard is added: the run is open by then, and most tests have rows."""


class Growing:
    """A router that a shard is added behind, by another router, while its earlier calls may still wait."""

    def __init__(self, router: ShardedQueue, other: ShardedQueue) -> None:
        self._router, self._other = router, other
        self._calls = 0

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._router, name)
        if not asyncio.iscoroutinefunction(method):
            return method

        async def call(*given: Any, **named: Any) -> Any:
            self._calls += 1
            if self._calls == GROWS_AT:
                assert await self._other.add_shard(NAMES[2]) == 2
            return await method(*given, **named)

        return call


@pytest.fixture(params=["in process", "over gRPC", "growing"])
async def queue(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Queue]:
    async with AsyncExitStack() as stack:
        shards: dict[str, Shard] = {}
        for name in NAMES:
            config = QueueConfig(store="memory", reserve_bytes=0)
            shard = await ShardQueue.open(stores.build(config, tmp_path / name))
            stack.push_async_callback(shard.close)
            if request.param != "over gRPC":
                shards[name] = shard
                continue
            settings = ServerSettings(metrics_port=None, drain_grace_s=1)
            servicers = [QueueServicer(shard), ShardServicer(shard)]
            server = await stack.enter_async_context(GrpcServer(settings, servicers))
            client = ShardClient(server.address, retry_s=1)
            shards[name] = await stack.enter_async_context(client)

        async def dial(address: str) -> Shard:
            return shards[address]

        def router() -> ShardedQueue:
            first = [shards[name] for name in NAMES[:2]]
            # No shard lags here, however busy the machine is: a lease would go on without its rows.
            queue = ShardedQueue(first, NAMES[:2], dial, lag_s=60)
            stack.push_async_callback(queue.close)
            return queue

        if request.param != "growing":
            yield router()
            return
        yield Growing(router(), router())  # type: ignore[misc]


class TestShardedQueue(QueueSuite):
    sharded = True


class TestShardedQueueBatches(QueueBatchSuite):
    sharded = True


class TestShardedQueueRepeat(QueueRepeatSuite):
    pass
