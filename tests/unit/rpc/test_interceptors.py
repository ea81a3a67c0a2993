"""Metrics, errors and draining around handlers of every arity, and what gRPC waits for between calls."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from google.protobuf.message import DecodeError

from meshrl.contract.errors import CapacityError, NotFoundError
from meshrl.rpc.call_limits import CallLimits
from meshrl.rpc.errors import DETAIL_KEY
from meshrl.rpc.interceptors import Context
from meshrl.rpc.methods import bare_row
from meshrl.rpc.runtime import GrpcServer, ServerSettings


def parse(data: bytes) -> bytes:
    """As protobuf's own parsers."""
    if data == b"garbage":
        raise DecodeError("no message")
    return data


def method(name: str, arity: str, *, request: bytes) -> Any:
    """A method of EchoServicer that is sent `request`, whatever the message is."""
    wire = SimpleNamespace(serialize=lambda _: request, parse=bytes)
    path, row = f"/test.Echo/{name}", bare_row(name)
    return SimpleNamespace(path=path, arity=arity, ask=wire, answer=wire, row=row)


class EchoServicer:
    """One method of each arity. It answers with the request, and with an error for "fail"."""

    service = "test.Echo"
    waits = frozenset({"Wait"})

    def __init__(self) -> None:
        self.serialize: Callable[[Any], bytes] | None = None
        """Serializer of the repeated messages."""
        self.waiting = asyncio.Event()
        self.left = asyncio.Event()

    def attach(self, server: grpc.aio.Server) -> None:
        parsing = {"request_deserializer": parse}
        methods = {
            "Say": grpc.unary_unary_rpc_method_handler(self.say, **parsing),
            "Repeat": grpc.unary_stream_rpc_method_handler(
                self.repeat, response_serializer=self.serialize, **parsing
            ),
            "Join": grpc.stream_unary_rpc_method_handler(self.join, **parsing),
            "Each": grpc.stream_stream_rpc_method_handler(self.each, **parsing),
            "Wait": grpc.unary_stream_rpc_method_handler(self.wait, **parsing),
        }
        handler = grpc.method_handlers_generic_handler(self.service, methods)
        server.add_generic_rpc_handlers((handler,))
        server.add_registered_method_handlers(self.service, methods)

    async def say(self, request: bytes, context: Context) -> bytes:
        return self._answer(request)

    async def repeat(self, request: bytes, context: Context) -> AsyncIterator[bytes]:
        yield b"first"
        yield self._answer(request)

    async def join(self, requests: AsyncIterator[bytes], context: Context) -> bytes:
        return b"".join([self._answer(request) async for request in requests])

    async def each(self, requests: AsyncIterator[bytes], context: Context) -> AsyncIterator[bytes]:
        async for request in requests:
            yield self._answer(request)

    async def wait(self, request: bytes, context: Context) -> AsyncIterator[bytes]:
        try:
            while True:
                yield bytes(1 << 20)
                self.waiting.set()
        finally:
            self.left.set()

    def _answer(self, request: bytes) -> bytes:
        if request == b"fail":
            raise NotFoundError("nothing of that name", name="fail")
        if request == b"exit":
            raise SystemExit(2)
        if request == b"interrupt":
            raise KeyboardInterrupt
        return request


@asynccontextmanager
async def echoing(
    servicer: EchoServicer | None = None,
    drain_grace_s: float = 1,
    limits: CallLimits | None = None,
) -> AsyncIterator[tuple[EchoServicer, GrpcServer, grpc.aio.Channel]]:
    servicer = servicer or EchoServicer()
    settings = ServerSettings(metrics_port=None, drain_grace_s=drain_grace_s)
    async with (
        GrpcServer(settings, [servicer], limits=limits) as server,
        grpc.aio.insecure_channel(server.address) as channel,
    ):
        yield servicer, server, channel


async def say(channel: grpc.aio.Channel, data: bytes) -> Any:
    return await channel.unary_unary("/test.Echo/Say")(data, timeout=60)


async def repeat(channel: grpc.aio.Channel, data: bytes) -> Any:
    return [each async for each in channel.unary_stream("/test.Echo/Repeat")(data, timeout=60)]


async def join(channel: grpc.aio.Channel, data: bytes) -> Any:
    return await channel.stream_unary("/test.Echo/Join")(iter([b"a", data]), timeout=60)


async def each(channel: grpc.aio.Channel, data: bytes) -> Any:
    call = channel.stream_stream("/test.Echo/Each")(iter([b"a", data]), timeout=60)
    return [answer async for answer in call]


ARITIES = pytest.mark.parametrize(
    ("call", "answer"),
    [(say, b"b"), (repeat, [b"first", b"b"]), (join, b"ab"), (each, [b"a", b"b"])],
    ids=["unary", "answers", "requests", "both"],
)
Call = Callable[[grpc.aio.Channel, bytes], Awaitable[Any]]


@ARITIES
@pytest.mark.parametrize("how", ["exit", "interrupt"])
async def test_an_exit_in_a_handler_is_an_error_of_its_call_and_the_server_goes_on(
    call: Call, answer: Any, how: str
) -> None:
    async with echoing() as (_, _, channel):
        with pytest.raises(grpc.aio.AioRpcError, match=r"SystemExit|KeyboardInterrupt") as caught:
            await call(channel, how.encode())
        assert caught.value.code() is grpc.StatusCode.INTERNAL
        assert await call(channel, b"b") == answer


def counted(server: GrpcServer, name: str, **labels: str) -> float | None:
    return server.registry.get_sample_value(name, labels)


@ARITIES
async def test_every_arity_is_answered_and_counted(call: Call, answer: Any) -> None:
    async with echoing() as (_, server, channel):
        assert await call(channel, b"b") == answer
        method = f"/test.Echo/{call.__name__.title()}"
    assert counted(server, "meshrl_rpc_total", method=method, status="OK") == 1
    assert counted(server, "meshrl_rpc_seconds_count", method=method) == 1
    assert counted(server, "meshrl_rpc_running", method=method) == 0


@ARITIES
async def test_every_arity_may_raise(call: Call, answer: Any) -> None:
    async with echoing() as (_, server, channel):
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await call(channel, b"fail")
        method = f"/test.Echo/{call.__name__.title()}"
    assert raised.value.code() is grpc.StatusCode.NOT_FOUND
    assert DETAIL_KEY in dict(raised.value.trailing_metadata() or ())
    assert counted(server, "meshrl_rpc_total", method=method, status="NOT_FOUND") == 1
    assert counted(server, "meshrl_rpc_running", method=method) == 0


@ARITIES
async def test_what_cannot_be_parsed_is_the_callers_mistake_in_every_arity(
    call: Call, answer: Any
) -> None:
    async with echoing() as (_, server, channel):
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await call(channel, b"garbage")
        assert await call(channel, b"b") == answer
        method = f"/test.Echo/{call.__name__.title()}"
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "cannot be parsed" in (raised.value.details() or "")
    assert counted(server, "meshrl_rpc_total", method=method, status="INVALID_ARGUMENT") == 1


async def test_a_caller_who_leaves_in_the_middle_of_an_answer_is_no_failure(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with echoing() as (servicer, server, channel):
        call = channel.unary_stream("/test.Echo/Wait")(b"")
        assert len(await call.read()) == 1 << 20
        call.cancel()
        async with asyncio.timeout(60):
            await servicer.left.wait()
        assert await say(channel, b"b") == b"b"
    assert counted(server, "meshrl_rpc_total", method="/test.Echo/Wait", status="CANCELLED") == 1
    assert counted(server, "meshrl_rpc_running", method="/test.Echo/Wait") == 0
    # gRPC itself may log that its write failed if it does not know yet that the caller has left.
    records = [each for each in caplog.records if each.name.startswith("meshrl")]
    assert [each for each in records if each.levelno >= logging.ERROR] == []


async def test_draining_ends_an_answer_that_is_being_written() -> None:
    async with echoing(drain_grace_s=60) as (servicer, server, channel):
        call = channel.unary_stream("/test.Echo/Wait")(b"")
        async with asyncio.timeout(60):
            await servicer.waiting.wait()
            # Nobody reads yet, so the servicer waits in a write for the HTTP/2 window.
            draining = asyncio.create_task(server.drain())
            await servicer.left.wait()
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                async for _ in call:
                    pass
            await draining
    assert raised.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_an_answer_that_cannot_be_serialized_arrives_as_its_error() -> None:
    def refuse(_: object) -> bytes:
        raise CapacityError("too much")

    servicer = EchoServicer()
    servicer.serialize = refuse
    async with echoing(servicer) as (_, server, channel):
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await repeat(channel, b"b")
    assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    status = {"method": "/test.Echo/Repeat", "status": "RESOURCE_EXHAUSTED"}
    assert counted(server, "meshrl_rpc_total", **status) == 1


async def test_between_calls_grpc_waits_for_one_thing_and_not_for_every_method(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waited: list[int] = []
    wait = asyncio.wait

    async def counting(awaited: Collection[Any], **options: Any) -> Any:
        waited.append(len(awaited))
        return await wait(awaited, **options)

    monkeypatch.setattr(asyncio, "wait", counting)
    async with echoing() as (_, _, channel):
        await say(channel, b"b")
    assert set(waited) <= {1}
