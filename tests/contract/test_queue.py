"""The queue contract, against every implementation: a new one is one more parameter of the fixture."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from meshrl.contract.ports import Queue
from meshrl.transferqueue import stores
from meshrl.transferqueue.config import QueueConfig
from meshrl.transferqueue.queue import TransferQueue

from .queue_batch_suite import QueueBatchSuite
from .queue_suite import QueueSuite


@pytest.fixture(params=["memory", "disk"])
async def queue(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Queue]:
    config = QueueConfig(store=request.param, reserve_bytes=0)
    opened = await TransferQueue.open(stores.build(config, tmp_path / "queue"))
    yield opened
    await opened.close()


class TestQueue(QueueSuite):
    pass


class TestQueueBatches(QueueBatchSuite):
    pass
