"""Messages of the weight plane on a real gRPC stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from meshrl.rpc.transport import CHANNEL_OPTIONS, SERVER_OPTIONS
from meshrl.v1 import weights_pb2 as pb
from meshrl.v1 import weights_pb2_grpc
from meshrl.weights.messages import MessageStream, stream_to_coordinator, stream_to_replica

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
