"""Serves a process's Prometheus metrics over HTTP, on its event loop, within limits of connections and time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from http import HTTPStatus
from typing import Final, cast
from urllib.parse import parse_qs, urlsplit

from prometheus_client import CollectorRegistry, PlatformCollector, ProcessCollector
from prometheus_client.exposition import choose_encoder

from meshrl.common.certificates import Certificates
from meshrl.common.sockets import is_loopback
from meshrl.contract.errors import ForbiddenError, UnauthenticatedError
from meshrl.rpc.connections import (
    Acceptor,
    Connection,
    ConnectionLimits,
    certificate_names,
    listen,
    server_tls,
)
from meshrl.rpc.identity import METRICS, Identity, Presented
from meshrl.rpc.web_origin import check_origin, hosts_of

CONNECTIONS: Final = 64
LONGEST_HEADER: Final = 16 << 10
TEXT: Final = "text/plain; charset=utf-8"


class MetricsEndpoint:
    """Answers GET on any path, as Prometheus' own server does, while it runs.

    It asks callers who they are. On loopback it speaks plain HTTP and refuses what a web page of another site may
    have sent; elsewhere it has the TLS of the service, mutual TLS included.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        host: str,
        port: int,
        certificates: Certificates = Certificates(),  # noqa: B008 - frozen
        *,
        identity: Identity | None = None,
        limits: ConnectionLimits | None = None,
    ) -> None:
        self.port = port
        """The port in use, once started. 0 picks a free one."""
        self._registry = registry
        self._host = host
        local = is_loopback(host)
        self._identity = identity
        self._tls = None if local else server_tls(certificates)
        self._hosts = hosts_of(host) if local else None
        self._limits = limits or ConnectionLimits(CONNECTIONS)
        self._acceptor: Acceptor
        self._accepting: asyncio.Task[None] | None = None
        ProcessCollector(registry=registry)
        PlatformCollector(registry=registry)

    def start(self) -> None:
        """Listen. Raises PortInUseError, UserError."""
        listener = listen(self._host, self.port, "cannot serve metrics on")
        self.port = listener.getsockname()[1]
        self._acceptor = Acceptor(listener, self._protocol, self._limits, self._tls)
        self._accepting = asyncio.create_task(self._acceptor.run(), name="metrics")

    async def stop(self) -> None:
        """Listen no more, and close every connection. Idempotent."""
        if self._accepting is not None:
            self._accepting.cancel()
            await asyncio.wait({self._accepting})
            self._acceptor.close()

    def _protocol(self, connection: Connection) -> asyncio.Protocol:
        return _OneRequest(self, connection)

    def answer(self, head: str, names: Sequence[str] | None) -> bytes:
        """The whole response to a request's line and headers; `names` are those of the client's certificate."""
        line, *rest = head.split("\r\n")
        words = line.split(" ")
        headers = {
            name.strip().lower(): value.strip()
            for name, _, value in (field.partition(":") for field in rest)
        }
        if len(words) != 3:
            return _response(HTTPStatus.BAD_REQUEST, b"not an HTTP request\n")
        if words[0] != "GET":
            return _response(HTTPStatus.METHOD_NOT_ALLOWED, b"want GET\n")
        try:
            if self._hosts is not None:
                check_origin(headers, self._hosts)
            if self._identity is not None:
                authorization = headers.get("authorization", "")
                self._identity.admit(METRICS, Presented(authorization=authorization, names=names))
        except (ForbiddenError, UnauthenticatedError) as error:
            forbidden = isinstance(error, ForbiddenError)
            status = HTTPStatus.FORBIDDEN if forbidden else HTTPStatus.UNAUTHORIZED
            return _response(status, f"{error.message}\n".encode())
        encode, kind = choose_encoder(headers.get("accept", ""))
        wanted = parse_qs(urlsplit(words[1]).query).get("name[]")
        shown = self._registry.restricted_registry(wanted) if wanted else self._registry
        return _response(HTTPStatus.OK, encode(shown), kind)


class _OneRequest(asyncio.Protocol):
    """Reads the headers of one request, answers it and closes."""

    def __init__(self, endpoint: MetricsEndpoint, connection: Connection) -> None:
        self._endpoint = endpoint
        self._connection = connection
        self._received = b""
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is no subclass
        self._connection.opens(self._transport)

    def data_received(self, data: bytes) -> None:
        if self._transport.is_closing():
            return
        self._received += data
        head, end, _ = self._received.partition(b"\r\n\r\n")
        if end:
            names = certificate_names(self._transport)
            self._transport.write(self._endpoint.answer(head.decode("latin-1"), names))
            self._transport.close()
        elif len(self._received) > LONGEST_HEADER:
            self._transport.write(_response(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, b""))
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._connection.lost()


def _response(status: HTTPStatus, body: bytes, kind: str = TEXT) -> bytes:
    head = (
        f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: {kind}\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body
