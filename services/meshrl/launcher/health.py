"""Asks a service whether it is ready for work: `grpc.health.v1`, answered at once or counted as no."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from meshrl.launcher.address_book import Entry
from meshrl.launcher.service import Probe
from meshrl.rpc import tls

ANSWER_S = 2.0


def health_probe(entry: Callable[[], Entry]) -> Probe:
    """A probe of wherever the address book says the service listens."""

    async def probe() -> bool:
        return await is_serving(entry())

    return probe


async def is_serving(entry: Entry) -> bool:
    """True when the service says SERVING."""
    try:
        # A refused connection is known at once; a gRPC channel would back off and notice the start late.
        async with asyncio.timeout(ANSWER_S):
            _, writer = await asyncio.open_connection(entry.host, entry.port)
    except (OSError, TimeoutError):
        return False
    writer.close()
    async with tls.health_channel(entry.address) as channel:
        try:
            answer = await health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(), timeout=ANSWER_S
            )
        except grpc.aio.AioRpcError:
            return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
