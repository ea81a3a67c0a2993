"""Serves a FastAPI app with uvicorn, on the event loop of the gRPC server: bind, accept, serve, drain."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from uvicorn.protocols.http.h11_impl import H11Protocol

from meshrl.common.certificates import Certificates
from meshrl.common.sockets import join_address
from meshrl.contract.errors import InfraError, UserError
from meshrl.http.responses import Refuse
from meshrl.http.web_requests import WebRequests
from meshrl.rpc.connections import Acceptor, Connection, ConnectionLimits, listen, server_tls
from meshrl.rpc.connections import certificate_names as peer_names
from meshrl.rpc.errors import PortInUseError
from meshrl.rpc.identity import Presented
from meshrl.rpc.web_origin import hosts_of

log = logging.getLogger(__name__)

DRAIN_S = 5
IDLE_S = 30
AT_ONCE = 256
"""Connections at the same time; uvicorn answers further ones with 503."""
CERTIFICATE = "certificate"
"""In the state of a request: the names of its client's certificate, or None."""


class _UvicornServer(uvicorn.Server):
    """Leaves signals to rpc.runtime, and accepting to rpc.connections."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Captures no signal."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listens on nothing."""
        await super().startup(sockets=[])


class _LimitedProtocol(H11Protocol):
    """Tells `connection` when a request begins and ends, so that one that never does is closed."""

    def __init__(self, connection: Connection, **options: Any) -> None:
        super().__init__(**options)
        self._connection = connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # as in H11Protocol
        self._connection.opens(transport)
        self.app_state[CERTIFICATE] = peer_names(transport)
        super().connection_made(transport)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._tell()

    def on_response_complete(self) -> None:
        self._connection.ends()
        super().on_response_complete()  # begins the next request if it has come already
        if self._running:
            self._connection.begins()

    def connection_lost(self, exc: Exception | None) -> None:
        self._connection.lost()
        super().connection_lost(exc)

    @property
    def _running(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _tell(self) -> None:
        if self._running:
            self._connection.begins()
        else:
            self._connection.awaits()


def presented_by(request: Request, subject: str = "") -> Presented:
    """What the caller shows of itself; `subject` is what the request is about."""
    return Presented(
        authorization=request.headers.get("authorization", ""),
        names=getattr(request.state, CERTIFICATE, None),
        peer=request.client.host if request.client else "unknown",
        door="http",
        subject=subject,
    )


@asynccontextmanager
async def serving_http(
    app: FastAPI,
    host: str,
    port: int,
    tls: Certificates,
    *,
    refuse: Refuse,
    name: str = "reward registry",
    limits: ConnectionLimits | None = None,
    allowed_hosts: Iterable[str] = (),
) -> AsyncIterator[str]:
    """Serve `app` while the body runs; yields the address, `http://host:port`.

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
    limits = limits or ConnectionLimits(AT_ONCE)
    context = server_tls(tls)
    try:
        listener = listen(host, port)
    except PortInUseError as error:  # the recipe names this one: whoever restarts us has no other
        raise UserError(error.message) from error
    config = uvicorn.Config(
        WebRequests(app, hosts_of(host, allowed_hosts), refuse),
        log_config=None,
        access_log=False,
        lifespan="off",
        ws="none",
        server_header=False,
        timeout_keep_alive=IDLE_S,
        timeout_graceful_shutdown=DRAIN_S,
        limit_concurrency=limits.total + 1,
    )
    server = _UvicornServer(config)

    def protocol(connection: Connection) -> asyncio.Protocol:
        state = server.server_state
        return _LimitedProtocol(connection, config=config, server_state=state, app_state={})

    acceptor = Acceptor(listener, protocol, limits, context)
    accepting = asyncio.create_task(acceptor.run(), name=f"{name} connections")
    task = asyncio.create_task(server.serve(sockets=[listener]), name=f"{name} http")
    scheme = "https" if context else "http"
    address = f"{scheme}://{join_address(host, listener.getsockname()[1])}"
    log.info("%s on %s (pages: %s/docs)", name, address, address)
    try:
        yield address
        for each in (task, accepting):
            if each.done():
                raise InfraError(f"the HTTP server of the {name} ended: {each.exception()}")
    finally:
        accepting.cancel()
        server.should_exit = True
        await asyncio.wait({task, accepting})
