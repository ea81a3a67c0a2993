"""The one ASGI application of a process, run by uvicorn: metrics, gateway, reward registry and view, by their ports.

Connections are accepted here, within limits that hold before anything is parsed or authenticated; uvicorn's protocol
reads the requests of each and calls `application`, which hands them to the app of the port on which they came.

    listening socket ──▶ HttpServer ──▶ HttpConnection ──▶ uvicorn ──▶ application ──▶ app of the port
                          limits         busy or idle

A connection is busy while a whole request of it runs, else idle: in its TLS handshake, half a request long, its body
included, or kept alive. At a limit the oldest idle one makes room, so that only running requests hold places. Who
begins a request has `header_s` to finish its headers, and who does not read an answer is disconnected (`Pace`).
"""
# ruff: noqa: D102 - of asyncio.Protocol

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import ssl
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from email.utils import formatdate
from functools import cache
from typing import Any, Final, TypeAlias, cast

from prometheus_client import CollectorRegistry, PlatformCollector, ProcessCollector, make_asgi_app
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from meshrl.common.sockets import Certificates, is_loopback, join_address
from meshrl.contract.errors import ForbiddenError, InfraError, UnauthenticatedError, UserError
from meshrl.rpc.errors import PortInUseError
from meshrl.rpc.identity import METRICS, Identity, Presented
from meshrl.rpc.interceptors import Pace
from meshrl.rpc.tls import ServerTls, server_tls
from meshrl.rpc.web_origin import Refuse, WebRequests, headers_of, hosts_of

log = logging.getLogger(__name__)

HEADER_S: Final = 10.0
DRAIN_S: Final = 5.0
"""Seconds that running requests get when the server stops."""
IDLE_S: Final = 30
"""Seconds for which a connection is kept alive between two requests."""
BACKLOG: Final = 128
OVERFLOW: Final = 32
"""Connections beyond the limit that are still answered, with 503: there are too many."""
ACCEPT_AGAIN_S: Final = 1.0
"""Pause after a connection that could not be accepted, for example because no file descriptor is left."""
CERTIFICATE: Final = "certificate"
"""In the state of a request: the names of its client's certificate, or None."""
CONNECTION: Final = "connection"

MakeProtocol: TypeAlias = Callable[[dict[str, Any]], asyncio.Protocol]
"""Makes the protocol of a connection; its argument becomes the state of each request."""


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """How many connections a server holds, and how long one may take to say what it wants."""

    total: int
    """Connections from all peers."""
    header_s: float = HEADER_S
    """Seconds for a TLS handshake, and for the headers of a request."""

    @property
    def per_peer(self) -> int:
        """Connections from one address: three quarters of all, so that others find room."""
        return max(1, self.total * 3 // 4)


HTTP_LIMITS: Final = ConnectionLimits(256)
METRICS_LIMITS: Final = ConnectionLimits(64)


class HttpConnection(asyncio.Protocol):
    """One accepted connection: hands everything on to a protocol of uvicorn."""

    def __init__(self, server: HttpServer, peer: str) -> None:
        self.peer = peer
        self._server = server
        self._running = 0
        self._arriving = False
        """The body of its request."""
        self._pace = Pace(self.close)
        self._protocol: asyncio.Protocol | None = None
        self._transport: asyncio.Transport | None = None
        self._opening: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._start_timer()

    @property
    def busy(self) -> bool:
        """True while a request runs that has come in whole."""
        return self._running > 0 and not self._arriving

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request by the app of the server; uvicorn keeps the connection for the next one."""

        async def received() -> Message:
            message = await receive()
            self._arriving = message.get("more_body", False)
            return message

        headers = headers_of(scope)
        self._arriving = "transfer-encoding" in headers or headers.get("content-length", "0") != "0"
        self._running += 1
        self._stop_timer()
        try:
            await self._server.answer(scope, received, send)
        finally:
            self._running -= 1
            self._server.idles(self)

    async def open(self, accepted: socket.socket, tls: ssl.SSLContext | None) -> None:
        """Begin to read; the connection is lost if the TLS handshake fails."""
        self._opening = asyncio.current_task()
        options: dict[str, Any] = {}
        if tls is not None:
            options = {"ssl": tls, "ssl_handshake_timeout": self._server.limits.header_s}
        try:
            loop = asyncio.get_running_loop()
            await loop.connect_accepted_socket(lambda: self, accepted, **options)
        except (OSError, TimeoutError) as error:  # ssl.SSLError is an OSError
            log.debug("a connection of %s was not opened: %s", self.peer, error)
            self._lost()
        except asyncio.CancelledError:
            accepted.close()
            self._lost()
            raise

    def close(self) -> None:
        """End it now."""
        if self._transport is not None:
            self._transport.abort()
        elif self._opening is not None:
            self._opening.cancel()
        self._lost()

    def end(self) -> None:
        """End it once what was written is sent."""
        if self._transport is not None:
            self._transport.close()
        else:
            self.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is no subclass
        state = {CERTIFICATE: _certificate_names(transport), CONNECTION: self}
        self._protocol = _uvicorn()(state)
        self._protocol.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        if self._protocol is not None:
            self._protocol.data_received(data)
        if not self._running:
            self._start_timer()

    def eof_received(self) -> bool | None:
        return self._protocol.eof_received() if self._protocol is not None else None

    def pause_writing(self) -> None:
        if self._transport is not None:
            self._pace.sends(self._transport.get_write_buffer_size())
        if self._protocol is not None:
            self._protocol.pause_writing()

    def resume_writing(self) -> None:
        self._pace.sent()
        if self._protocol is not None:
            self._protocol.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost()
        if self._protocol is not None:
            self._protocol.connection_lost(exc)

    def _lost(self) -> None:
        self._stop_timer()
        self._pace.sent()
        self._server.forget(self)

    def _start_timer(self) -> None:
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._server.limits.header_s, self.close)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class HttpServer:
    """Serves an app on one listening socket."""

    def __init__(
        self,
        app: ASGIApp,
        listener: socket.socket,
        limits: ConnectionLimits,
        tls: ServerTls | None = None,
    ) -> None:
        """Nothing is accepted before `run`."""
        self.limits = limits
        self._app = app
        self._listener = listener
        self._tls = tls
        self._open: dict[HttpConnection, None] = {}
        """In the order in which they became idle, or opened."""
        self._by_peer: Counter[str] = Counter()
        self._requests: set[asyncio.Task[Any]] = set()

    async def run(self) -> None:
        """Accept until cancelled; then the listening socket is closed, and open connections continue."""
        loop = asyncio.get_running_loop()
        self._listener.setblocking(False)
        try:
            async with asyncio.TaskGroup() as opening:
                while True:
                    try:
                        accepted, address = await loop.sock_accept(self._listener)
                    except OSError as error:
                        log.error("no connection can be accepted: %s", error.strerror or error)
                        self._make_room(None)
                        await asyncio.sleep(ACCEPT_AGAIN_S)
                        continue
                    connection = self._admit(str(address[0]))
                    if connection is None:
                        accepted.close()
                    else:
                        tls = self._tls.get() if self._tls is not None else None
                        opening.create_task(connection.open(accepted, tls))
        finally:
            self._listener.close()

    async def drain(self, grace_s: float) -> None:
        """Give running requests `grace_s` to end, and close every connection."""
        for connection in list(self._open):
            if not connection.busy:
                connection.end()
        if self._requests:
            _, late = await asyncio.wait(self._requests, timeout=grace_s)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        for connection in list(self._open):
            connection.end()

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request: with 503, if there are more connections than may be."""
        app = self._app if len(self._open) <= self.limits.total else _too_many
        request = asyncio.current_task()
        assert request is not None
        self._requests.add(request)
        try:
            await app(scope, receive, send)
        finally:
            self._requests.discard(request)

    def idles(self, connection: HttpConnection) -> None:
        """Note an idle connection: it is the last of those that must make room."""
        if connection in self._open:
            self._open[connection] = self._open.pop(connection)

    def forget(self, connection: HttpConnection) -> None:
        """Forget a closed connection. Idempotent."""
        if connection in self._open:
            del self._open[connection]
            self._by_peer[connection.peer] -= 1
            if not self._by_peer[connection.peer]:
                del self._by_peer[connection.peer]

    def _admit(self, peer: str) -> HttpConnection | None:
        """A connection of `peer`; None if there are too many, and all of them are busy."""
        if self._by_peer[peer] >= self.limits.per_peer and not self._make_room(peer):
            return None
        if len(self._open) >= self.limits.total:
            self._make_room(None)
        if len(self._open) >= self.limits.total + OVERFLOW:
            return None
        connection = HttpConnection(self, peer)
        self._open[connection] = None
        self._by_peer[peer] += 1
        return connection

    def _make_room(self, peer: str | None) -> bool:
        """Close the oldest idle connection, of `peer`, or of the address with the most; False if all are busy."""
        if peer is None:
            idle = Counter(each.peer for each in self._open if not each.busy)
            if not idle:
                return False
            ((peer, _),) = idle.most_common(1)
        for each in self._open:
            if each.peer == peer and not each.busy:
                each.close()
                return True
        return False


_common_headers: list[tuple[bytes, bytes]] = []
"""Headers of every answer of this process."""


async def application(scope: Scope, receive: Receive, send: Send) -> None:
    """Serve as the application of this process: each request goes to the app of its port."""
    _common_headers[:] = [(b"date", formatdate(usegmt=True).encode())]
    connection: HttpConnection = scope["state"].pop(CONNECTION)
    await connection.answer(scope, receive, send)


@cache
def _uvicorn() -> MakeProtocol:
    # Imported with the first connection, so that no service starts later because of it.
    from uvicorn.config import Config
    from uvicorn.server import ServerState

    config = Config(
        application,
        interface="asgi3",
        http="h11",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=IDLE_S,
    )
    config.load()
    state = ServerState()
    state.default_headers = _common_headers
    return lambda app_state: config.http_protocol_class(  # type: ignore[call-arg] # as uvicorn's own
        config=config, server_state=state, app_state=app_state
    )


@asynccontextmanager
async def serving(
    app: ASGIApp,
    host: str,
    port: int,
    tls: Certificates,
    limits: ConnectionLimits,
    *,
    name: str,
    cannot: str = "cannot listen on",
) -> AsyncIterator[int]:
    """Serve `app` while the body runs; yields the port. `cannot` begins the message of one that cannot be used.

    Raises:
        PortInUseError, UserError: cannot listen on the port.
        ConfigError: a certificate cannot be used.
    """
    context = server_tls(tls)
    listener = _listen(host, port, cannot)
    async with serving_on(listener, app, limits, context, name=name):
        yield listener.getsockname()[1]


@asynccontextmanager
async def serving_on(
    listener: socket.socket,
    app: ASGIApp,
    limits: ConnectionLimits,
    tls: ServerTls | None = None,
    *,
    name: str,
    grace_s: float = DRAIN_S,
) -> AsyncIterator[None]:
    """Serve `app` on a listening socket while the body runs, and close it; running requests get `grace_s` then."""
    server = HttpServer(app, listener, limits, tls)
    accepting = asyncio.create_task(server.run(), name=f"{name} connections")
    try:
        yield
        if accepting.done():
            raise InfraError(f"the HTTP server of the {name} ended: {accepting.exception()}")
    finally:
        accepting.cancel()
        await asyncio.wait({accepting})
        await server.drain(grace_s)


@asynccontextmanager
async def serving_metrics(
    registry: CollectorRegistry,
    host: str,
    port: int,
    tls: Certificates = Certificates(),  # noqa: B008 - frozen
    *,
    identity: Identity | None = None,
    limits: ConnectionLimits = METRICS_LIMITS,
) -> AsyncIterator[int]:
    """Answer GET on any path with the metrics of `registry` and of this process, as Prometheus' own server does.

    On loopback it speaks plain HTTP and refuses what a web page of another site may have sent; elsewhere it has the
    TLS of the service, mutual TLS included. Yields the port. Raises as `serving`.
    """
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    app = _metrics_app(registry, identity or Identity(None, asks=False))
    if is_loopback(host):
        tls, app = Certificates(), WebRequests(app, hosts_of(host), _text)
    cannot = "cannot serve metrics on"
    async with serving(app, host, port, tls, limits, name="metrics", cannot=cannot) as used:
        yield used


def _metrics_app(registry: CollectorRegistry, identity: Identity) -> ASGIApp:
    shown = make_asgi_app(registry, disable_compression=True)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        answer: ASGIApp = shown
        authorization = headers_of(scope).get("authorization", "")
        presented = Presented(authorization=authorization, names=scope["state"][CERTIFICATE])
        if scope["method"] != "GET":
            answer = _text(405, "", "want GET")
        try:
            identity.admit(METRICS, presented)
        except UnauthenticatedError as error:
            answer = _text(401, error.code, error.message)
        except ForbiddenError as error:
            answer = _text(403, error.code, error.message)
        try:
            await answer(scope, receive, send)
        except UnicodeDecodeError:
            await _text(400, "", "the request is not UTF-8")(scope, receive, send)

    return app


def _text(status: int, code: str, detail: str) -> ASGIApp:
    """The answer to a request that is refused; the connection ends with it."""
    kind, end = (b"content-type", b"text/plain; charset=utf-8"), (b"connection", b"close")

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": status, "headers": [kind, end]})
        await send({"type": "http.response.body", "body": f"{detail}\n".encode()})

    return app


_too_many: Final = _text(503, "capacity", "too many connections: try again")


@asynccontextmanager
async def serving_http(
    app: ASGIApp,
    host: str,
    port: int,
    tls: Certificates,
    *,
    refuse: Refuse,
    name: str = "reward registry",
    limits: ConnectionLimits = HTTP_LIMITS,
    allowed_hosts: Iterable[str] = (),
) -> AsyncIterator[str]:
    """Serve `app` to programs and to its own pages while the body runs; yields the address, `http://host:port`.

    Args:
        app: The app.
        host: Address to listen on.
        port: 0 picks a free one.
        tls: Certificates.
        refuse: Answers what a web page of another site may have sent, as the app answers its failures.
        name: Name in log lines.
        limits: Most connections, and the time to send a request's headers.
        allowed_hosts: Names under which clients call the server, besides `localhost` and `host`.

    Raises:
        UserError: cannot listen on the port, or a certificate cannot be used.
    """
    guarded = WebRequests(app, hosts_of(host, allowed_hosts), refuse)
    async with AsyncExitStack() as stack:
        try:
            opened = serving(guarded, host, port, tls, limits, name=name)
            port = await stack.enter_async_context(opened)
        except PortInUseError as error:  # the recipe names this one: a supervisor has no other
            raise UserError(error.message) from error
        address = f"{'https' if tls.cert else 'http'}://{join_address(host, port)}"
        log.info("%s on %s (pages: %s/docs)", name, address, address)
        yield address


def _certificate_names(transport: asyncio.BaseTransport) -> tuple[str, ...] | None:
    """Common name and SANs of a client's certificate; None if it has none."""
    certificate = transport.get_extra_info("peercert")
    if not certificate:
        return None
    subject = (pair for part in certificate.get("subject", ()) for pair in part)
    return (
        *(value for key, value in subject if key == "commonName"),
        *(value for _, value in certificate.get("subjectAltName", ())),
    )


def _listen(host: str, port: int, cannot: str) -> socket.socket:
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        kind = PortInUseError if error.errno == errno.EADDRINUSE else UserError
        raise kind(
            f"{cannot} {join_address(host, port)}: {error.strerror or error}", port=port
        ) from error
    return listener
