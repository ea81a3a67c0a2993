"""The proxy of a box: which hosts it passes requests on to, and what it refuses."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest
from pydantic import ValidationError

from meshrl.rollout.containers import proxy
from meshrl.rollout.containers.box import BoxLimits
from meshrl.rollout.containers.proxy import HostProxy

PUBLIC = "93.184.215.14"
NAMES = {
    "good.example": [PUBLIC],
    "other.example": [PUBLIC],
    "home.example": ["127.0.0.1"],
    "lan.example": ["10.1.2.3"],
    "cloud.example": ["169.254.169.254"],
    "shared.example": ["100.64.0.1"],
    "zero.example": ["0.0.0.0"],
    "many.example": ["224.0.0.1"],
    "mixed.example": [PUBLIC, "192.168.0.1"],
}
LISTED = [name for name in NAMES if name != "other.example"]


@pytest.fixture
async def ask(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Any]:
    """Sends bytes to a proxy before hosts that answer what they were sent; a list of where it connected."""
    connected: list[tuple[str, int]] = []
    loop = asyncio.get_running_loop()
    resolve, connect = loop.getaddrinfo, asyncio.open_connection

    async def resolved(host: str, port: Any, **rest: Any) -> Any:
        if host not in NAMES:
            return await resolve(host, port, **rest)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (each, 0)) for each in NAMES[host]]

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"SAID " + await reader.read(1 << 16))
        writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    target = server.sockets[0].getsockname()

    async def to_echo(address: str, port: int) -> Any:
        connected.append((address, port))
        return await connect(*target)

    listener = socket.create_server(("127.0.0.1", 0))
    place = listener.getsockname()
    async with HostProxy(LISTED).serving(listener) as variables:
        assert variables["HTTPS_PROXY"] == f"http://127.0.0.1:{place[1]}"
        monkeypatch.setattr(loop, "getaddrinfo", resolved, raising=False)
        monkeypatch.setattr(proxy.asyncio, "open_connection", to_echo)

        async def asked(*sent: bytes) -> str:
            reader, writer = await connect(*place)
            said = b""
            for part in sent:
                writer.write(part)
                said += await reader.readuntil(b"\r\n\r\n") if part is not sent[-1] else b""
            writer.write_eof()
            said += await reader.read()
            writer.close()
            return said.decode()

        yield asked, connected
    server.close()


async def test_listed_hosts_are_reached_by_their_resolved_address(ask: Any) -> None:
    asked, connected = ask
    said = await asked(b"CONNECT Good.example:443 HTTP/1.1\r\n\r\n", b"hello")
    assert said == "HTTP/1.1 200 Connection established\r\n\r\nSAID hello"
    said = await asked(
        b"GET http://good.example/a?b=c HTTP/1.1\r\nHost: other.example\r\nConnection: keep-alive\r\n"
        b"Proxy-Authorization: x\r\nAccept: */*\r\n\r\n"
    )
    assert said == (
        "SAID GET /a?b=c HTTP/1.1\r\nHost: good.example\r\nConnection: close\r\nAccept: */*\r\n\r\n"
    )
    assert connected == [(PUBLIC, 443), (PUBLIC, 80)]


@pytest.mark.parametrize(
    "line",
    [
        "CONNECT other.example:443",
        "CONNECT sub.good.example:443",
        "CONNECT good.example.:443",
        "CONNECT good.example:22",
        "CONNECT good.example",
        "CONNECT 127.0.0.1:443",
        f"CONNECT {PUBLIC}:443",
        "CONNECT [::1]:443",
        "CONNECT 2130706433:443",
        "CONNECT good.example@127.0.0.1:443",
        "CONNECT 127.0.0.1@good.example:443",
        "CONNECT http://good.example:443",
        "GET http://good.example:443/",
        "GET http://good.example:8080/",
        "GET https://good.example/",
        "GET ftp://good.example/",
        "GET file:///etc/passwd",
        "GET /",
        "GET http://127.0.0.1/",
        "GET http://[::ffff:127.0.0.1]/",
        "GET http://good.example:x/",
        "GET",
        *(f"CONNECT {name}:443" for name in LISTED if name != "good.example"),
    ],
)
async def test_nothing_else_is(ask: Any, line: str) -> None:
    """A redirect is another request, and so is refused alike."""
    asked, connected = ask
    version = " HTTP/1.1" if " " in line else ""
    said = await asked(f"{line}{version}\r\nHost: good.example\r\n\r\n".encode())
    assert said.startswith("HTTP/1.1 403 Forbidden\r\n")
    assert connected == []


async def test_a_connection_that_is_open_at_the_end_is_closed_without_a_word() -> None:
    loop, told = asyncio.get_running_loop(), []
    loop.set_exception_handler(lambda _, context: told.append(context))
    listener = socket.create_server(("127.0.0.1", 0))
    place = listener.getsockname()
    async with HostProxy(LISTED).serving(listener):
        reader, writer = await asyncio.open_connection(*place)
        writer.write(b"CONNECT good")
        await asyncio.sleep(0.05)
    assert await reader.read() == b""
    writer.close()
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection(*place)
    assert told == []


@pytest.mark.parametrize(
    "name", ["127.0.0.1", "localhost", "*", "", "127.1", "::1", "a b.org", "x.org:80"]
)
def test_hosts_are_names(name: str) -> None:
    with pytest.raises(ValidationError, match=r"want the name of a host, as pypi\.org"):
        BoxLimits(hosts=(name,))
    assert BoxLimits(hosts=("files.PyPI.org",)).hosts == ("files.PyPI.org",)
