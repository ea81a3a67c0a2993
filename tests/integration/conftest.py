"""What several integration tests ask for: a model that talks, each carrier of weights in turn, queue processes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from meshrl.rpc.runtime import GrpcServer, ServerSettings
from meshrl.rpc.servicers.queue import QueueServicer
from meshrl.rpc.servicers.shard import ShardServicer
from meshrl.transferqueue.sharding import ShardQueue
from meshrl.transferqueue.stores.memory import MemoryStore

from ..chat_model import write_chat_model


@pytest.fixture(scope="session")
def talking_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's tiny model with a chat template."""
    path = tmp_path_factory.mktemp("talking")
    write_chat_model(path)
    return path


@pytest.fixture(params=["gloo", "disk", "shm", "cuda_ipc", "auto", "nccl", "delta", "disk:memory"])
def carrier(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
async def addresses() -> AsyncIterator[list[str]]:
    """Of three empty queues."""
    async with AsyncExitStack() as stack:
        found = []
        for _ in range(3):
            shard = await ShardQueue.open(MemoryStore())
            stack.push_async_callback(shard.close)
            settings = ServerSettings(metrics_port=None, drain_grace_s=1)
            servicers = [QueueServicer(shard), ShardServicer(shard)]
            server = await stack.enter_async_context(GrpcServer(settings, servicers))
            found.append(server.address)
        yield found
