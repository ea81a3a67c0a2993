"""The queue contract through a servicer and a client over gRPC on loopback, whose payload is compressed.

As it is, it crosses gRPC in every test of a mesh.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import pytest

from meshrl.contract.errors import NotFoundError
from meshrl.contract.ports import Queue
from meshrl.rpc.clients.queue import QueueClient
from meshrl.rpc.runtime import GrpcServer, ServerSettings
from meshrl.rpc.servicers import QueueServicer
from meshrl.testing.contract.queue_batch_suite import QueueBatchSuite
from meshrl.testing.contract.queue_repeat_suite import QueueRepeatSuite
from meshrl.testing.contract.queue_suite import QueueSuite
from meshrl.transferqueue import stores
from meshrl.transferqueue.config import QueueConfig
from meshrl.transferqueue.queue import TransferQueue


@pytest.fixture
async def queue(tmp_path: Path) -> AsyncIterator[Queue]:
    config = QueueConfig(store="memory")
    opened = await TransferQueue.open(stores.build(config, tmp_path / "queue"))
    settings = ServerSettings(metrics_port=None, drain_grace_s=1)
    async with (
        GrpcServer(settings, [QueueServicer(opened)]) as server,
        QueueClient(server.address, retry_s=1, compression="zstd") as client,
    ):
        with suppress(NotFoundError):
            # The first call connects; some tests measure milliseconds.
            await client.fetch_rows("none", [], [])
        yield client
    await opened.close()


class TestQueueOverGrpc(QueueSuite):
    pass


class TestQueueBatchesOverGrpc(QueueBatchSuite):
    pass


class TestQueueRepeatOverGrpc(QueueRepeatSuite):
    pass
