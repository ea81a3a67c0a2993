"""The queue contract through a router over two shards: in this process, and each behind a gRPC server of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from meshrl.contract.ports import Queue
from meshrl.services.doors import QueueDoor
from meshrl.services.doors.shard import ShardDoor
from meshrl.services.runtime import Server, ServerSettings
from meshrl.services.wires.shard import ShardWire
from meshrl.transferqueue import stores
from meshrl.transferqueue.config import QueueConfig
from meshrl.transferqueue.sharding.port import Shard
from meshrl.transferqueue.sharding.router import ShardedQueue
from meshrl.transferqueue.sharding.shard import ShardQueue

from .queue_again_suite import QueueAgainSuite
from .queue_batch_suite import QueueBatchSuite
from .queue_suite import QueueSuite


@pytest.fixture(params=["in process", "over gRPC"])
async def queue(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Queue]:
    async with AsyncExitStack() as stack:
        shards: list[Shard] = []
        for name in ("queue-0", "queue-1"):
            config = QueueConfig(store="memory", reserve_bytes=0)
            shard = await ShardQueue.open(stores.build(config, tmp_path / name))
            stack.push_async_callback(shard.close)
            if request.param == "in process":
                shards.append(shard)
                continue
            settings = ServerSettings(metrics_port=None, drain_grace_s=1)
            doors = [QueueDoor(shard), ShardDoor(shard)]
            server = await stack.enter_async_context(Server(settings, doors))
            shards.append(await stack.enter_async_context(ShardWire(server.address, patience_s=1)))
        router = ShardedQueue(shards)
        stack.push_async_callback(router.close)
        yield router


class TestShardedQueue(QueueSuite):
    sharded = True


class TestShardedQueueBatches(QueueBatchSuite):
    sharded = True


class TestShardedQueueAgain(QueueAgainSuite):
    pass
