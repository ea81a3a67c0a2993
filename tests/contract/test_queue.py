"""The queue contract, against every implementation: a new one is one more parameter of the fixture."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from uuid import uuid4

import pytest

from meshrl.contract.ports import Queue
from meshrl.testing.contract.queue_batch_suite import QueueBatchSuite
from meshrl.testing.contract.queue_repeat_suite import QueueRepeatSuite
from meshrl.testing.contract.queue_suite import QueueSuite
from meshrl.transferqueue import stores
from meshrl.transferqueue.config import QueueConfig
from meshrl.transferqueue.queue import TransferQueue

from ..redis_server import RedisServer, needs_redis, running


@pytest.fixture(scope="module")
def redis_server() -> Iterator[RedisServer]:
    with TemporaryDirectory() as folder, running(Path(folder)) as server:
        yield server


@pytest.fixture(params=["memory", "disk", pytest.param("redis", marks=needs_redis)])
async def queue(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Queue]:
    config = QueueConfig(store=request.param, reserve_bytes=0)
    if request.param == "redis":
        server: RedisServer = request.getfixturevalue("redis_server")
        config = QueueConfig(
            store="redis",
            durability="none",
            redis_url=server.url,
            redis_prefix=uuid4().hex,
        )
    opened = await TransferQueue.open(stores.build(config, tmp_path / "queue"))
    yield opened
    await opened.close()


class TestQueue(QueueSuite):
    pass


class TestQueueBatches(QueueBatchSuite):
    pass


class TestQueueRepeat(QueueRepeatSuite):
    pass
