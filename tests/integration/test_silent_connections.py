"""Connections on which nothing is said stay open, however often the client's keepalive asks whether they live.

A client of the mesh pings after 20 s of silence. These clients ping every second, so that a server that takes offence
("Too many pings") does so within seconds. `make soak` stays silent for ten minutes.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import grpc
import pytest
from grpc._cython import cygrpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from meshrl.contract.types import Sample, Score
from meshrl.rpc.runtime import GrpcServer, ServerSettings
from meshrl.rpc.servicers import RewardServicer
from meshrl.rpc.transport import CHANNEL_OPTIONS, SERVER_OPTIONS
from meshrl.v1 import reward_pb2, reward_pb2_grpc

SILENCE_S = float(os.environ.get("SOAK_S", "6"))
"""Long enough for the fourth ping, at which gRPC's defaults close a connection."""
PINGS = {
    "grpc.keepalive_time_ms": 1_000,
    "grpc.keepalive_permit_without_calls": 1,
}


class SlowJudge:
    """A Judge that says nothing for a while."""

    reward_hash = "slow"

    async def score(self, samples: Sequence[Sample]) -> Sequence[Score]:
        await asyncio.sleep(SILENCE_S)
        return []

    async def close(self) -> None: ...


@pytest.fixture
async def server() -> AsyncIterator[GrpcServer]:
    settings = ServerSettings(drain_grace_s=1, metrics_port=None)
    async with GrpcServer(settings, [RewardServicer(SlowJudge())]) as serving:
        await serving.ready()
        yield serving


def pinging(address: str) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(
        address, options=tuple((dict(CHANNEL_OPTIONS) | PINGS).items())
    )


async def silent_call(address: str) -> None:
    async with pinging(address) as channel:
        await reward_pb2_grpc.RewardStub(channel).Score(reward_pb2.ScoreRequest())


async def silent_stream(address: str) -> None:
    async with pinging(address) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(TimeoutError):  # any end of the stream is another error
            async with asyncio.timeout(SILENCE_S):
                await watch.read()


async def idle_connection(address: str) -> None:
    async with pinging(address) as channel:
        await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        assert channel.get_state() is grpc.ChannelConnectivity.READY
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(SILENCE_S):
                await channel.wait_for_state_change(grpc.ChannelConnectivity.READY)


@pytest.mark.timeout(60 + 2 * SILENCE_S)
async def test_a_silent_call_a_silent_stream_and_an_idle_connection_outlive_their_pings(
    server: GrpcServer,
) -> None:
    async with asyncio.TaskGroup() as together:
        together.create_task(silent_call(server.address))
        together.create_task(silent_stream(server.address))
        together.create_task(idle_connection(server.address))


@pytest.mark.parametrize("name", sorted({name for name, _ in (*CHANNEL_OPTIONS, *SERVER_OPTIONS)}))
def test_every_option_is_one_that_grpc_knows(name: str) -> None:
    # gRPC ignores a name that it does not know.
    assert name.encode() in Path(cygrpc.__file__).read_bytes()
