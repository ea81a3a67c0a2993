"""The queue contract through a router over two shards in this process."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from meshrl.contract.ports import Queue
from meshrl.transferqueue import stores
from meshrl.transferqueue.config import QueueConfig
from meshrl.transferqueue.sharding.router import ShardedQueue
from meshrl.transferqueue.sharding.shard import ShardQueue

from .queue_batch_suite import QueueBatchSuite
from .queue_suite import QueueSuite


@pytest.fixture
async def queue(tmp_path: Path) -> AsyncIterator[Queue]:
    async with AsyncExitStack() as stack:
        shards = []
        for name in ("queue-0", "queue-1"):
            config = QueueConfig(store="memory", reserve_bytes=0)
            shard = await ShardQueue.open(stores.build(config, tmp_path / name))
            stack.push_async_callback(shard.close)
            shards.append(shard)
        router = ShardedQueue(shards)
        stack.push_async_callback(router.close)
        yield router


class TestShardedQueue(QueueSuite):
    in_order = False


class TestShardedQueueBatches(QueueBatchSuite):
    in_order = False
