"""Each bucket is taken as soon as it is gathered, by every carrier: sent, or written where the replicas read it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from meshrl.contract.types import Version
from meshrl.rpc.transport import CHANNEL_OPTIONS, SERVER_OPTIONS
from meshrl.v1 import weights_pb2 as pb
from meshrl.v1 import weights_pb2_grpc
from meshrl.weights.messages import (
    MessageStream,
    SourceError,
    stream_to_coordinator,
    stream_to_replica,
)
from meshrl.weights.replica_controller import Joining
from tests.doubles.weights import GatheredStub, StubSource

from ..waiting import until
from .weights_fleet import RUN, Fleet, opened

CARRIERS = pytest.mark.parametrize(
    "carrier", ["shm", "disk", "disk:memory", "delta", "gloo", "auto"]
)
SPARSE = 0.02


class Watched(GatheredStub):
    """Knows which of its buckets were read."""

    def __init__(self, step: int) -> None:
        super().__init__(RUN, Version(1, step), density=SPARSE)
        self.read: set[int] = set()

    def bucket(self, index: int) -> np.ndarray:
        self.read.add(index)
        return super().bucket(index)


async def served(fleet: Fleet, source: StubSource) -> None:
    await until(lambda: fleet.published[-1:] == [source.manifest.version])


@CARRIERS
async def test_a_bucket_is_taken_before_the_next_one_is_gathered(
    carrier: str, tmp_path: Path
) -> None:
    async with opened(carrier, tmp_path) as fleet:
        engines = await fleet.joined("one", "two")
        for step in range(3):  # with auto, the third needs no look at what changed
            await fleet.carry(StubSource(RUN, Version(1, step), density=SPARSE))
        source = Watched(3)
        await fleet.coordinator.publish(source)
        for index in range(4):
            assert index not in source.read
            source.come(index)
            await until(lambda index=index: index in source.read)
        await served(fleet, source)
        for engine in (*engines, await fleet.joined_late("late")):
            assert engine.version == Version(1, 3)
            assert engine.hashes == source.manifest.bucket_hashes
        await fleet.carry(StubSource(RUN, Version(1, 4), density=SPARSE))
        assert engines[0].version == Version(1, 4)


@CARRIERS
async def test_a_version_whose_gather_fails_is_nowhere_and_the_next_one_goes_through(
    carrier: str, tmp_path: Path
) -> None:
    async with opened(carrier, tmp_path) as fleet:
        engines = await fleet.joined("one", "two")
        for step in range(3):
            await fleet.carry(StubSource(RUN, Version(1, step), density=SPARSE))
        hashes = engines[0].hashes
        source = Watched(3)
        await fleet.coordinator.publish(source)
        source.come(0)
        await until(lambda: 0 in source.read)
        source.fail(RuntimeError("rank 1 has died"))
        with pytest.raises(SourceError, match=r"1\.3 were not gathered: rank 1 has died"):
            await fleet.coordinator.drained()
        late = await fleet.joined_late("late")
        assert [engine.hashes for engine in (*engines, late)] == [hashes] * 3
        after = StubSource(RUN, Version(1, 4), density=SPARSE)
        await fleet.carry(after)
        assert {engine.hashes for engine in engines} == {after.manifest.bucket_hashes}
        assert fleet.published == [Version(1, step) for step in (0, 1, 2, 4)]
    assert not list(tmp_path.rglob("*1.3*"))  # noqa: ASYNC240


@pytest.mark.parametrize("carrier", ["delta", "gloo"])
async def test_what_a_replica_says_late_of_a_withdrawn_version_is_no_answer_of_the_next_one(
    carrier: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    says = Joining._send

    async def slowly(self: Joining, version: Version, **body: object) -> None:
        if "received" in body and version == Version(1, 1):
            await until(lambda: withdrawn)
        await says(self, version, **body)

    monkeypatch.setattr(Joining, "_send", slowly)
    withdrawn: list[bool] = []
    async with opened(carrier, tmp_path) as fleet:
        engines = await fleet.joined("one", "two")
        await fleet.carry(fleet.source(0))
        source = Watched(1)
        await fleet.coordinator.publish(source)
        source.come(0)
        await until(lambda: 0 in source.read)
        source.fail(RuntimeError("rank 1 has died"))
        with pytest.raises(SourceError):
            await fleet.coordinator.drained()
        withdrawn.append(True)
        await fleet.carry(fleet.source(2))
        assert [engine.version for engine in engines] == [Version(1, 2)] * 2


async def test_a_late_joiner_is_served_while_a_version_is_gathered(tmp_path: Path) -> None:
    async with opened("disk", tmp_path) as fleet:
        await fleet.joined("one")
        await fleet.carry(fleet.source(0))
        source = Watched(1)
        await fleet.coordinator.publish(source)
        source.come(0)
        await until(lambda: 0 in source.read)
        late = await fleet.joined_late("late")
        assert late.version == Version(1, 0)
        for index in range(1, 4):
            source.come(index)
        await served(fleet, source)
        await until(lambda: late.hashes == source.manifest.bucket_hashes)


SILENCE_S = 20.0
LARGE = "x" * (16 << 20)
"""More than gRPC holds for one who does not read."""


class Joined(weights_pb2_grpc.WeightsServicer):
    """Hands its end of the only call to the test."""

    def __init__(self) -> None:
        self.stream: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.over = asyncio.Event()

    async def Join(self, request_iterator: Any, context: Any) -> None:  # type: ignore[override]
        self.stream.set_result(stream_to_replica(request_iterator, context, SILENCE_S))
        await self.over.wait()


@pytest.fixture
async def ends() -> AsyncIterator[tuple[MessageStream[Any, Any], MessageStream[Any, Any]]]:
    server, joined = grpc.aio.server(options=SERVER_OPTIONS), Joined()
    weights_pb2_grpc.add_WeightsServicer_to_server(joined, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=CHANNEL_OPTIONS)
    replica = stream_to_coordinator(channel, SILENCE_S)
    try:
        yield await asyncio.wait_for(joined.stream, 10), replica
    finally:
        joined.over.set()
        await channel.close()
        await server.stop(0)


@pytest.mark.parametrize("sender", ["trainer", "replica"])
async def test_a_send_that_is_cancelled_leaves_the_stream_to_the_next(
    ends: tuple[MessageStream[Any, Any], MessageStream[Any, Any]], sender: str
) -> None:
    trainer, replica = ends
    if sender == "trainer":
        writer, reader = trainer, replica
        large: Any = pb.PlaneMessage(propose=pb.PlanePropose(endpoint=LARGE))
        small: Any = pb.PlaneMessage(abort=pb.PlaneAbort())
    else:
        writer, reader = replica, trainer
        large = pb.ReplicaMessage(hello=pb.ReplicaHello(replica=LARGE))
        small = pb.ReplicaMessage(beat=pb.Beat())
    first = asyncio.create_task(writer.send(large))
    await asyncio.sleep(0.3)
    assert not first.done()  # nobody reads
    first.cancel()
    second = asyncio.create_task(writer.send(small))
    await asyncio.sleep(0.3)
    assert [(await reader.read()).WhichOneof("body") for _ in range(2)] == [
        large.WhichOneof("body"), small.WhichOneof("body"),
    ]  # fmt: skip
    await second
