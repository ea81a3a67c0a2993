"""A proxy on the loopback of one box, by which its processes reach listed hosts of the internet and nothing else.

    process ── CONNECT name:443, or GET http://name/ ──▶ worker: listed? resolved to public addresses alone? ──▶ host

The address that was looked at is the one that is connected to: a name has no second answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import socket
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

log = logging.getLogger(__name__)

HEAD_BYTES = 64 << 10
HEAD_S = 10.0
CONNECT_S = 15.0
IDLE_S = 300.0
"""Seconds for which a connection may be silent in one direction."""
MOST = 64
"""Connections of one box at once."""
PIECE = 1 << 16
HTTP, HTTPS = 80, 443


class RefusedRequestError(Exception):
    """A request that is not passed on; its text is for the client."""


class HostProxy:
    """Passes requests of one box on to `hosts`."""

    def __init__(self, hosts: Collection[str]) -> None:
        self._hosts = frozenset(name.lower() for name in hosts)
        self._running: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def serving(self, listener: socket.socket) -> AsyncIterator[dict[str, str]]:
        """Serve while the body runs; yields the variables in which clients look for a proxy."""
        host, port = listener.getsockname()[:2]
        server = await asyncio.start_server(self._accepted, sock=listener, limit=HEAD_BYTES)
        url = f"http://{host}:{port}"
        own = {"no_proxy": "localhost,127.0.0.1"}
        lower = {"http_proxy": url, "https_proxy": url, **own}
        try:
            yield lower | {name.upper(): value for name, value in lower.items()}
        finally:
            server.close()
            for task in self._running:
                task.cancel()
            await asyncio.gather(*self._running, return_exceptions=True)

    def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._running) >= MOST:
            writer.close()
            return
        # asyncio tells of a cancelled task of its own as of an error.
        task = asyncio.create_task(self._until_end(reader, writer))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _until_end(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._answer(reader, writer)
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            log.debug("a connection of a box ended", exc_info=True)
        finally:
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with asyncio.timeout(HEAD_S):
            head = await reader.readuntil(b"\r\n\r\n")
        try:
            name, port, passed = _asked(head)
            if name not in self._hosts:
                raise RefusedRequestError(
                    f"{name[:256]} is none of rollout.containers.limits.hosts"
                )
            address = await _public_address(name)
        except (RefusedRequestError, ValueError) as error:
            text = f"{error}\n".encode(errors="replace")
            writer.write(b"HTTP/1.1 403 Forbidden\r\nConnection: close\r\n")
            writer.write(b"Content-Length: %d\r\n\r\n%s" % (len(text), text))
            await writer.drain()
            return
        async with asyncio.timeout(CONNECT_S):
            there, to = await asyncio.open_connection(address, port)
        try:
            if passed:
                to.write(passed)
            else:
                writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
            await asyncio.gather(_copy(reader, to), _copy(there, writer))
        finally:
            to.close()


def _asked(head: bytes) -> tuple[str, int, bytes]:
    """Name and port of the head of a request, and what is passed on of it. Raises RefusedRequestError, ValueError."""
    line, *fields = head.decode("latin-1").split("\r\n")
    method, target, _ = line.split(" ")
    url = urlsplit(f"https://{target}" if method == "CONNECT" else target)
    wanted = HTTPS if method == "CONNECT" else HTTP
    name, port = (url.hostname or "").lower(), url.port or (HTTP if wanted == HTTP else 0)
    if url.scheme not in ("http", "https") or (url.scheme == "https") != (method == "CONNECT"):
        raise RefusedRequestError("want CONNECT name:443, or a whole URL of http")
    if port != wanted or url.username is not None:
        raise RefusedRequestError(f"want port {wanted} of a name, as CONNECT {name[:256]}:443")
    if method == "CONNECT":
        return name, port, b""
    hidden = ("host:", "connection:", "proxy-", "keep-alive:")
    kept = [field for field in fields if field and not field.lower().startswith(hidden)]
    path = (url.path or "/") + (f"?{url.query}" if url.query else "")
    lines = [f"{method} {path} HTTP/1.1", f"Host: {name}", "Connection: close", *kept, "", ""]
    return name, port, "\r\n".join(lines).encode("latin-1")


async def _public_address(name: str) -> str:
    """An IPv4 address of a host. Raises RefusedRequestError: it has none, or one that is not of the internet."""
    try:
        found = await asyncio.get_running_loop().getaddrinfo(
            name, None, family=socket.AF_INET, type=socket.SOCK_STREAM
        )
    except OSError as error:
        raise RefusedRequestError(f"{name} cannot be resolved: {error}") from error
    addresses = [str(each[4][0]) for each in found]
    for address in addresses:
        known = ipaddress.ip_address(address)
        if not known.is_global or known.is_multicast:
            raise RefusedRequestError(f"{name} is {address}, not an address of the internet")
    return addresses[0]


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy to the end of what is sent."""
    while True:
        async with asyncio.timeout(IDLE_S):
            if not (data := await reader.read(PIECE)):
                break
            writer.write(data)
            await writer.drain()
    with contextlib.suppress(OSError):
        writer.write_eof()
