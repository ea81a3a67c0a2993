"""How many calls, bytes and connections a server holds, from one caller and from all of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import Any, cast

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from meshrl.contract.errors import BusyError
from meshrl.rpc.call_limits import HEALTH_CHECK, HEALTH_WATCH, CallLimits
from meshrl.rpc.clients.base import Connection, connect
from meshrl.rpc.credentials import MeshRole
from meshrl.rpc.identity import ANYBODY, CALLER
from meshrl.rpc.interceptors import Context, collected
from meshrl.rpc.runtime import GrpcServer, ServerSettings

from .test_interceptors import EchoServicer, echoing, method

ATTEND, LEASE, RENEW, WRITE = (
    f"/meshrl.v1.Queue/{m}" for m in ("Attend", "Lease", "Renew", "Write")
)


@dataclass
class Call:
    """A call as gRPC reports it."""

    address: str

    def peer(self) -> str:
        return f"ipv4:{self.address}:50250"


class Server:
    """Calls that wait until they are cancelled, behind limits; in memory."""

    def __init__(self, limits: CallLimits) -> None:
        self._limits = limits
        self._tasks = set[asyncio.Task[Any]]()

    async def __aenter__(self) -> Server:
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def begin(
        self, address: str, role: MeshRole | None, method: str = WRITE, request: Any = b""
    ) -> asyncio.Task[Any]:
        """Make a call."""

        async def wait(request: Any, context: Context) -> None:
            if not isinstance(request, bytes):
                await collected(request)
            await asyncio.Event().wait()

        wait_in_role = self._limits.by_role(method, wait)

        async def identified(request: Any, context: Context) -> Any:
            CALLER.set(replace(ANYBODY, roles=frozenset((role,) if role else ())))
            return await wait_in_role(request, context)

        call = self._limits.by_address(method, identified)(request, cast("Context", Call(address)))
        self._tasks.add(task := asyncio.create_task(call))
        return task

    async def call(
        self, address: str, role: MeshRole | None, method: str = WRITE, request: Any = b""
    ) -> asyncio.Task[Any]:
        """A call that has begun to wait. Raises what refuses it."""
        task = self.begin(address, role, method, request)
        await asyncio.sleep(0)
        if task.done():
            task.result()
        return task


async def test_a_fleet_of_a_thousand_workers_of_one_address_fits() -> None:
    async with Server(CallLimits()) as server:
        calls = [
            server.begin("10.0.0.1", MeshRole.ROLLOUT, method)
            for _ in range(1000)
            for method in (ATTEND, LEASE, RENEW, WRITE)
        ]
        await asyncio.sleep(0)
        assert not any(call.done() for call in calls)


async def test_one_address_leaves_room_for_others_and_all_together_have_a_limit() -> None:
    async with Server(CallLimits(calls=8)) as server:
        calls = [await server.call("10.0.0.1", role) for role in (*MeshRole,)[:6]]
        with pytest.raises(
            BusyError, match=r"^10\.0\.0\.1 holds 6 calls here and may hold 6: try again$"
        ):
            await server.call("10.0.0.1", MeshRole.TRAINER)
        await server.call("10.0.0.2", MeshRole.TRAINER)
        await server.call("10.0.0.3", MeshRole.TRAINER)
        with pytest.raises(BusyError, match="this service holds 8 calls and takes 8: try again"):
            await server.call("10.0.0.4", MeshRole.TRAINER)
        calls[0].cancel()
        await asyncio.gather(calls[0], return_exceptions=True)
        await server.call("10.0.0.4", MeshRole.TRAINER)


async def test_one_role_leaves_room_for_others_from_wherever_it_calls() -> None:
    async with Server(CallLimits(calls=8)) as server:
        for number in range(6):
            await server.call(f"10.0.0.{number}", MeshRole.ROLLOUT)
        with pytest.raises(BusyError, match="the role rollout holds 6 calls here and may hold 6"):
            await server.call("10.0.0.7", MeshRole.ROLLOUT)
        await server.call("10.0.0.7", MeshRole.TRAINER)


async def test_watching_health_takes_little_room_and_asking_for_it_none() -> None:
    async with Server(CallLimits(calls=32)) as server:
        for number in range(2):
            await server.call(f"10.0.0.{number}", None, HEALTH_WATCH)
        with pytest.raises(BusyError, match=r"Health/Watch for anybody holds 2 calls here"):
            await server.call("10.0.0.9", None, HEALTH_WATCH)
        for _ in range(99):
            await server.call("10.0.0.1", None, HEALTH_CHECK)


@dataclass
class Message:
    """A message of a streamed request."""

    size: int

    def ByteSize(self) -> int:
        return self.size


async def stream(*sizes: int) -> AsyncIterator[Message]:
    for size in sizes:
        yield Message(size)


async def test_the_bytes_of_requests_that_are_held_are_counted_for_each_address() -> None:
    async with Server(CallLimits(request_bytes=1000)) as server:
        held = await server.call("10.0.0.1", MeshRole.ROLLOUT, request=bytes(300))
        await server.call("10.0.0.1", MeshRole.ROLLOUT, request=stream(200, 200))
        with pytest.raises(BusyError, match="holds 740 bytes of requests here and may hold 750"):
            await server.call("10.0.0.1", MeshRole.ROLLOUT, request=stream(40, 60))
        await server.call("10.0.0.2", MeshRole.ROLLOUT, request=stream(200))
        with pytest.raises(BusyError, match="holds 900 bytes of requests and takes 1000"):
            await server.call("10.0.0.2", MeshRole.ROLLOUT, request=bytes(101))
        held.cancel()
        await asyncio.gather(held, return_exceptions=True)
        await server.call("10.0.0.2", MeshRole.ROLLOUT, request=bytes(101))


async def test_a_refused_call_is_resource_exhausted_and_clients_try_again() -> None:
    servicer = EchoServicer()
    async with echoing(servicer, limits=CallLimits(calls=2)) as (_, server, channel):
        waiting = channel.unary_stream("/test.Echo/Wait")(b"")
        await servicer.waiting.wait()
        refused = channel.unary_unary("/test.Echo/Say")(b"")
        assert await refused.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert await refused.details() == "127.0.0.1 holds 1 calls here and may hold 1: try again"
        connection = Connection("echo", server.address, retry_s=60, connect=lambda _: channel)
        say = method("Say", "unary_unary", request=b"hello")
        answer = asyncio.create_task(connection.call(say, Message(5), bytes))
        waiting.cancel()
        assert await answer == b"hello"


async def test_a_thousand_calls_that_begin_at_once_are_all_answered() -> None:
    async with echoing() as (_, _, channel):
        say = channel.unary_unary("/test.Echo/Say")
        answers = await asyncio.gather(*(say(b"%d" % number) for number in range(1500)))
    assert answers == [b"%d" % number for number in range(1500)]


async def test_a_connection_too_many_is_closed_and_finds_room_when_another_has_left() -> None:
    settings = ServerSettings(metrics_port=None, drain_grace_s=1)
    request = health_pb2.HealthCheckRequest()
    async with (
        GrpcServer(settings, [], limits=CallLimits(connections=2)) as server,
        AsyncExitStack() as opened,
    ):
        first, second, third = [
            await opened.enter_async_context(connect(server.address)) for _ in range(3)
        ]
        for channel in (first, second):
            await health_pb2_grpc.HealthStub(channel).Check(request, timeout=60)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await health_pb2_grpc.HealthStub(third).Check(request, timeout=60)
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        await first.close()
        await health_pb2_grpc.HealthStub(third).Check(request, timeout=60, wait_for_ready=True)
