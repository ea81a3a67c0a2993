"""Shared settings of all tests: hypothesis profiles, Ctrl-C, and a world of one rank."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

from meshrl.transferqueue.queue import TransferQueue
from meshrl.transferqueue.stores.memory import MemoryStore

from . import forks

if TYPE_CHECKING:
    from meshrl.trainer.ranks.world import World

# Several files of tests run at once, each with processes of its own: more threads would only wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# No example has a deadline: a busy machine may pause for a second anywhere.
settings.register_profile("meshrl", max_examples=30, deadline=None)
settings.load_profile("meshrl")

forks.install()

# The collector would look through what thousands of modules make while tests are collected, again and again.
gc.disable()


def pytest_collection_finish() -> None:
    """Collect from here on, and leave out what is there already."""
    gc.freeze()
    gc.enable()


# A shell that starts the tests in the background has them ignore it, and their children too.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _no_credential_of_another_test() -> Iterator[None]:
    """A command that runs in the test's process leaves what it presents to later tests."""
    yield
    if identity := sys.modules.get("meshrl.rpc.credentials"):
        identity.use(None)


@pytest.fixture
def own_package() -> Iterator[None]:
    """For a test that imports a package `my_package` of its own: no later test finds it loaded."""
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == "my_package"]:
        del sys.modules[name]


@pytest.fixture
async def queue() -> AsyncIterator[TransferQueue]:
    """An empty queue in memory."""
    opened = await TransferQueue.open(MemoryStore())
    yield opened
    await opened.close()


@pytest.fixture
async def queue_address(queue: TransferQueue) -> AsyncIterator[str]:
    """The address of `queue` over gRPC; a file with a queue of its own overrides that fixture."""
    from meshrl.rpc.runtime import GrpcServer, ServerSettings
    from meshrl.rpc.servicers import QueueServicer

    settings = ServerSettings(metrics_port=None, drain_grace_s=1)
    async with GrpcServer(settings, [QueueServicer(queue)]) as server:
        yield server.address


@pytest.fixture(scope="session")
def world() -> Iterator[World]:
    """One rank on the CPU; torch is imported only where a test asks for it."""
    import torch

    from meshrl.trainer.ranks.world import World

    torch.set_num_threads(1)
    world = World.start("cpu")
    yield world
    world.close()
