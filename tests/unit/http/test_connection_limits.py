"""Connections that say nothing, or half of something, take no place from others: HTTP servers and metrics alike."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import trustme
import uvloop
from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse
from prometheus_client import CollectorRegistry
from starlette.exceptions import HTTPException

from meshrl.common.sockets import Certificates
from meshrl.contract.errors import ConfigError
from meshrl.http import common
from meshrl.http.common import BodyLimit, problem
from meshrl.rpc import interceptors
from meshrl.rpc.http_server import ConnectionLimits, serving_http, serving_metrics

from ...certificates import issue

HALF = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n"
WHOLE = HALF + b"Connection: close\r\n\r\n"
PLAIN = Certificates()
OPEN_FOR_EVER = 3600.0
LARGE = 32 << 20
Serve: TypeAlias = Callable[[ConnectionLimits], AbstractAsyncContextManager[int]]


@asynccontextmanager
async def http(limits: ConnectionLimits, body_s: float = 0.05) -> AsyncIterator[int]:
    app = FastAPI()
    app.add_middleware(BodyLimit, limit=100, refuse=problem, body_s=body_s)

    @app.get("/metrics")
    async def root() -> str:
        return "metrics"

    @app.post("/post")
    async def post(body: dict[str, int]) -> dict[str, int]:
        return body

    @app.get("/large")
    async def large() -> Response:
        return StreamingResponse(bytes(1 << 20) for _ in range(LARGE >> 20))

    @app.post("/wait_for")
    async def wait_for(request: Request) -> None:
        await request.body()

    @app.get("/wait")
    async def wait() -> None:
        await asyncio.sleep(OPEN_FOR_EVER)

    async with serving_http(
        app, "127.0.0.1", 0, Certificates(), limits=limits, refuse=problem
    ) as url:
        yield int(url.rpartition(":")[2])


@asynccontextmanager
async def metrics(
    limits: ConnectionLimits, tls: Certificates = PLAIN, host: str = "127.0.0.1"
) -> AsyncIterator[int]:
    async with serving_metrics(CollectorRegistry(), host, 0, tls, limits=limits) as port:
        yield port


@pytest.fixture(params=[http, metrics], ids=["http", "metrics"])
def serve(request: pytest.FixtureRequest) -> Serve:
    chosen: Serve = request.param
    return chosen


async def say(port: int, text: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(text)
    return reader, writer


async def answer_to(port: int, text: bytes) -> bytes:
    """Everything until the server closes."""
    reader, writer = await say(port, text)
    try:
        return await reader.read()
    except ConnectionError:
        return b""
    finally:
        writer.close()


@pytest.mark.parametrize("begun", [b"", b"G", HALF], ids=["nothing", "a letter", "half"])
async def test_a_request_that_is_never_finished_is_closed(serve: Serve, begun: bytes) -> None:
    async with serve(ConnectionLimits(8, header_s=0.05)) as port:
        assert await answer_to(port, begun) == b""


async def test_half_open_connections_leave_room_for_others(serve: Serve) -> None:
    async with AsyncExitStack() as stack:
        port = await stack.enter_async_context(serve(ConnectionLimits(8, header_s=OPEN_FOR_EVER)))
        for _ in range(100):
            _, writer = await say(port, HALF)
            stack.callback(writer.close)
        assert (await answer_to(port, WHOLE)).startswith(b"HTTP/1.1 200 OK")


def test_the_event_loop_of_the_services_keeps_the_same_limits(serve: Serve) -> None:
    async def main() -> None:
        async with serve(ConnectionLimits(8, header_s=0.05)) as port:
            assert await answer_to(port, HALF) == b""
        async with serve(ConnectionLimits(8, header_s=OPEN_FOR_EVER)) as port:
            writers = [(await say(port, HALF))[1] for _ in range(100)]
            assert (await answer_to(port, WHOLE)).startswith(b"HTTP/1.1 200 OK")
            for writer in writers:
                writer.close()

    uvloop.run(main())


async def test_requests_that_run_are_not_closed_for_newcomers() -> None:
    async with AsyncExitStack() as stack:
        port = await stack.enter_async_context(http(ConnectionLimits(4)))
        waiting = []
        for _ in range(3):  # of the four places, one address may have three
            reader, writer = await say(port, WHOLE.replace(b"/metrics", b"/wait"))
            stack.callback(writer.close)
            waiting.append(asyncio.create_task(reader.read()))
        refused = asyncio.create_task(answer_to(port, WHOLE))
        done, _ = await asyncio.wait([refused, *waiting], return_when=asyncio.FIRST_COMPLETED)
        assert done == {refused}
        assert refused.result() == b""
        for task in waiting:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task


@pytest.mark.parametrize("how", [b"Content-Length: 9", b"Transfer-Encoding: chunked"])
@pytest.mark.parametrize("begun", [b"", b"2\r\n{\n\r\n"], ids=["nothing", "some"])
async def test_a_body_that_is_not_there_yet_makes_room(how: bytes, begun: bytes) -> None:
    head = b"POST /wait_for HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    async with AsyncExitStack() as stack:
        port = await stack.enter_async_context(http(ConnectionLimits(4), body_s=OPEN_FOR_EVER))
        for _ in range(20):
            _, writer = await say(port, head + how + b"\r\n\r\n" + begun)
            stack.callback(writer.close)
            await asyncio.sleep(0.01)
        assert (await answer_to(port, WHOLE)).startswith(b"HTTP/1.1 200 OK")


async def test_a_body_that_comes_slowly_is_taken_if_nobody_wants_its_place() -> None:
    head = b"POST /post HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    limits = ConnectionLimits(4, header_s=0.05)
    async with http(limits, body_s=OPEN_FOR_EVER) as port:
        reader, writer = await say(port, head + b"Content-Length: 8\r\nConnection: close\r\n\r\n")
        for letter in b'{"a": 1}':
            await asyncio.sleep(0.02)
            writer.write(bytes([letter]))
        assert (await reader.read()).endswith(b'{"a":1}')
        writer.close()


async def test_who_does_not_read_an_answer_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interceptors, "PATIENCE_S", 0.2)
    monkeypatch.setattr(interceptors, "LEAST_RATE", 1 << 40)
    async with AsyncExitStack() as stack:
        port = await stack.enter_async_context(http(ConnectionLimits(2)))  # one for each address
        reader, writer = await say(port, WHOLE.replace(b"/metrics", b"/large"))
        stack.callback(writer.close)
        await reader.readexactly(1)
        while not (await answer_to(port, WHOLE)).startswith(b"HTTP/1.1 200 OK"):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        with contextlib.suppress(ConnectionError):
            assert len(await reader.read()) < LARGE


async def test_who_comes_while_all_places_are_busy_is_told_so() -> None:
    async with AsyncExitStack() as stack:
        port = await stack.enter_async_context(http(ConnectionLimits(4)))
        waiting = []
        for peer in ("127.0.0.1", "127.0.0.1", "127.0.0.1", "127.0.0.2"):
            reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(peer, 0))
            stack.callback(writer.close)
            writer.write(WHOLE.replace(b"/metrics", b"/wait"))
            waiting.append(asyncio.create_task(reader.read()))
        await asyncio.sleep(0)
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", port, local_addr=("127.0.0.3", 0)
        )
        writer.write(HALF + b"\r\n")
        said = await reader.read()
        assert said.startswith(b"HTTP/1.1 503") and b"too many connections" in said
        writer.close()
        for task in waiting:
            assert not task.done()
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task


async def test_two_ports_of_one_process_have_their_own_apps() -> None:
    async with http(ConnectionLimits(8)) as one, metrics(ConnectionLimits(8)) as other:
        assert b'"metrics"' in await answer_to(one, WHOLE)
        assert b"python_info" in await answer_to(other, WHOLE)
        assert b"404" in await answer_to(one, WHOLE.replace(b"/metrics", b"/other"))
        assert b"python_info" in await answer_to(other, WHOLE.replace(b"/metrics", b"/other"))


async def test_a_connection_that_is_kept_alive_serves_again_and_then_makes_room() -> None:
    async with http(ConnectionLimits(2)) as port:  # one for each address
        kept, writer = await say(port, HALF + b"\r\n")
        for _ in range(2):
            assert b"200 OK" in await kept.readuntil(b'"metrics"')
            writer.write(HALF + b"\r\n")
        await kept.readuntil(b'"metrics"')
        assert b"200 OK" in await answer_to(port, WHOLE)
        with contextlib.suppress(ConnectionError):
            assert await kept.read() == b""
        writer.close()


async def test_a_body_that_never_ends_is_refused() -> None:
    head = b"POST /post HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    async with http(ConnectionLimits(8)) as port:
        said = await answer_to(port, head + b"Content-Length: 9\r\nConnection: close\r\n\r\n{")
    assert said.startswith(b"HTTP/1.1 408")


async def test_an_endless_header_is_refused(serve: Serve) -> None:
    async with serve(ConnectionLimits(8, header_s=OPEN_FOR_EVER)) as port:
        said = await answer_to(port, HALF + b"X: " + b"x" * 100_000)
    assert said == b"" or said.startswith(b"HTTP/1.1 4")


async def test_metrics_refuse_what_a_page_of_another_site_asks() -> None:
    async with metrics(ConnectionLimits(8)) as port:
        for line in (b"Host: evil.example", b"Host: localhost\r\nOrigin: https://evil.example"):
            said = await answer_to(port, WHOLE.replace(b"Host: localhost", line))
            assert said.startswith(b"HTTP/1.1 403")
        assert (await answer_to(port, b"\r\n\r\n")).startswith(b"HTTP/1.1 400")
        assert (await answer_to(port, WHOLE.replace(b"GET", b"PUT"))).startswith(b"HTTP/1.1 405")


async def test_metrics_beyond_loopback_need_the_client_certificate_that_the_service_needs(
    tmp_path: Path,
) -> None:
    mine = issue(tmp_path, trustme.CA())
    files = replace(mine, client_ca=mine.ca)
    limits = ConnectionLimits(8, header_s=OPEN_FOR_EVER)
    async with metrics(limits, files, "0.0.0.0") as port, AsyncExitStack() as stack:
        for _ in range(20):  # half of a TLS handshake
            _, writer = await say(port, b"\x16\x03\x01")
            stack.callback(writer.close)
        trusting = ssl.create_default_context(cafile=str(files.client_ca))
        with pytest.raises((ssl.SSLError, ConnectionError, EOFError)):
            reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trusting)
            writer.write(WHOLE)
            await reader.readexactly(1)
        trusting.load_cert_chain(str(files.cert), str(files.key))
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trusting)
        writer.write(WHOLE)
        assert (await reader.readline()).startswith(b"HTTP/1.1 200 OK")
        writer.close()
    (tmp_path / "key").chmod(0o644)
    with pytest.raises(ConfigError, match=r"tls\.key: every user of this machine may read"):
        async with metrics(limits, files, "0.0.0.0"):
            pass


async def test_bodies_of_which_more_is_to_come_are_bounded_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(common, "MOST_BODIES", 4 << 20)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        while (await receive())["more_body"]:
            pass

    limited = BodyLimit(app, limit=8 << 20, refuse=problem)
    ends: list[asyncio.Future[bool]] = []

    def begin(key: str, size: int) -> asyncio.Task[None]:
        """Send so much of a body, and its end once the future of it is set."""
        ends.append(end := asyncio.get_running_loop().create_future())
        parts = iter([{"body": bytes(size), "more_body": True}])

        async def receive() -> Any:
            return next(parts, None) or {"body": b"", "more_body": await end}

        async def send(message: Any) -> None: ...

        headers = [(b"x-api-key", key.encode())]
        scope = {"type": "http", "headers": headers, "client": ("127.0.0.1", len(ends))}
        return asyncio.create_task(limited(scope, receive, send))

    greedy = [begin("greedy", 1 << 20) for _ in range(3)]
    refused = begin("greedy", 1 << 20)
    with pytest.raises(HTTPException, match=r"429: caller .* holds 3145728 bytes of unfinished"):
        await asyncio.wait_for(refused, 30)
    other, third = begin("another", 1 << 20), begin("third", 1 << 20)
    with pytest.raises(HTTPException, match="429: this service holds 4194304 bytes"):
        await asyncio.wait_for(third, 30)
    small = begin("third", 64 << 10)
    for end in ends:
        end.set_result(False)
    await asyncio.wait_for(asyncio.gather(*greedy, other, small), 30)
    last = begin("third", 4 << 20)
    ends[-1].set_result(False)
    await asyncio.wait_for(last, 30)
