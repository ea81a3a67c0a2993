"""One process that the supervisor starts, the rules of its start, restart and drain, and whether it is ready."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from meshrl.launcher.address_book import ServiceAddress
from meshrl.launcher.preloading import Kind
from meshrl.rpc import tls

Probe: TypeAlias = Callable[[], Awaitable[bool]]
"""Answers at once whether a service is ready for work."""


async def always_ready() -> bool:
    """The probe of a process that is ready at once."""
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """One supervised process."""

    name: str
    """Unique: `rollout-0`."""
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    preload: Kind = "light"
    """The preloader that may fork it: the one that has imported what it needs, and no more."""
    probe: Probe = always_ready
    start_order: int = 0
    """Services of the same number start together, once all of the lower numbers are ready."""
    drain_order: int = 0
    """Services of the same number stop together; the lowest first."""
    drain_s: float = 30.0
    """How long a drain may take before the process is killed."""
    ready_s: float = 300.0
    """How long a start may take before it counts as failed."""
    finite: bool = False
    """True: exit code 0 means that its work is done. False: it should not have ended."""
    leads: bool = False
    """True: when it is done, the run is done."""
    removable: bool = False
    """True: it may be drained while the run continues."""
    fleet: str = ""
    """Services of one fleet stand in for each other: the run continues without those that keep failing, while one is
    left. Empty: no service does its work."""
    expendable: bool = False
    """True: of a fleet, and the run continues also where it finds something wrong with its recipe or options."""
    cannot_restart: str = ""
    """Why it must not be started again after a crash; empty where it may."""
    crash_at_start: str = ""
    """Why it would crash again where it crashed before it was ready; empty where it may not."""
    elsewhere: bool = False
    """The process is a launcher's: its end of input drains the service, SIGINT ends it at once."""
    on_port_taken: Callable[[], None] | None = None
    """Chooses another port; None where ports are fixed."""


ANSWER_S = 2.0


def health_probe(entry: Callable[[], ServiceAddress]) -> Probe:
    """A probe of wherever the address book says the service listens."""

    async def probe() -> bool:
        return await is_serving(entry())

    return probe


async def is_serving(entry: ServiceAddress) -> bool:
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
