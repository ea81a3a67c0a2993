"""The deadline of a streamed answer is per message; a client passes by the proxies of the environment."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from concurrent import futures
from threading import Thread

import grpc
import pytest

from meshrl.rpc.clients import base
from meshrl.rpc.tls import PROXY, blocking_channel

from ...simulation.virtual_time import in_virtual_time

SILENCE_S = 30.0


class Answers:
    """A call that answers with numbers, each after its pause."""

    def __init__(self, pauses: list[float]) -> None:
        self.cancelled = False
        self._pauses = pauses

    async def __aiter__(self) -> AsyncIterator[int]:
        for number, seconds in enumerate(self._pauses):
            await asyncio.sleep(seconds)
            yield number

    def cancel(self) -> None:
        self.cancelled = True


@in_virtual_time
async def test_a_stream_may_take_long_if_each_message_is_in_time() -> None:
    call = Answers([0.8 * SILENCE_S] * 5)
    assert await base._collect(lambda: call, SILENCE_S) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("before", [0, 1, 4])
@in_virtual_time
async def test_a_late_message_ends_the_wait_wherever_it_is(before: int) -> None:
    call = Answers([0.8 * SILENCE_S] * before + [1.2 * SILENCE_S])
    with pytest.raises(TimeoutError):
        await base._collect(lambda: call, SILENCE_S)
    assert call.cancelled


VARIABLES = ("grpc_proxy", "http_proxy", "https_proxy", "HTTP_PROXY")


@pytest.fixture
def service() -> Iterator[str]:
    server = grpc.server(futures.ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None).wait()


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, list[bytes]]]:
    """A proxy that hangs up, and what it was asked."""
    for name in ("no_proxy", "NO_PROXY", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
    asked: list[bytes] = []
    listener = socket.create_server(("127.0.0.1", 0))

    def answer() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:  # closed
                return
            with connection:
                asked.append(connection.recv(100))

    Thread(target=answer, daemon=True).start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}", asked
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()


def test_a_service_is_reached_past_the_proxies_of_the_environment(
    service: str, proxy: tuple[str, list[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in VARIABLES:
        monkeypatch.setenv(name, proxy[0])
    with blocking_channel(service) as channel:
        grpc.channel_ready_future(channel).result(60)
    assert proxy[1] == []


def test_a_proxy_that_is_named_for_the_mesh_is_used(
    service: str, proxy: tuple[str, list[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PROXY, proxy[0])
    with blocking_channel(service) as channel, pytest.raises(grpc.RpcError, match="UNAVAILABLE"):
        channel.unary_unary("/any/Thing")(b"", timeout=60)
    assert proxy[1] and proxy[1][0].startswith(f"CONNECT {service} ".encode())
