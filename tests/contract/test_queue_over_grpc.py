"""The queue contract through a door and a wire, over a real gRPC server on loopback."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from meshrl.contract.ports import Queue
from meshrl.services.doors import QueueDoor
from meshrl.services.runtime import Server, ServerSettings
from meshrl.services.wires import QueueWire
from meshrl.transferqueue import stores
from meshrl.transferqueue.config import QueueConfig
from meshrl.transferqueue.queue import TransferQueue

from .queue_again_suite import QueueAgainSuite
from .queue_batch_suite import QueueBatchSuite
from .queue_suite import QueueSuite


@pytest.fixture(params=["off", "zstd"])
async def queue(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Queue]:
    config = QueueConfig(store="memory")
    opened = await TransferQueue.open(stores.build(config, tmp_path / "queue"))
    async with (
        Server(ServerSettings(metrics_port=None, drain_grace_s=1), [QueueDoor(opened)]) as server,
        QueueWire(server.address, patience_s=1, compression=request.param) as wire,
    ):
        yield wire
    await opened.close()


class TestQueueOverGrpc(QueueSuite):
    pass


class TestQueueBatchesOverGrpc(QueueBatchSuite):
    pass


class TestQueueAgainOverGrpc(QueueAgainSuite):
    pass
