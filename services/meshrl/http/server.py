"""Serves a FastAPI app with uvicorn, on the event loop of the gRPC server: bind, serve, drain."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import uvicorn
from fastapi import FastAPI

from meshrl.contract.certificates import Certificates
from meshrl.contract.errors import InfraError, UserError
from meshrl.rpc.runtime import join_address

log = logging.getLogger(__name__)

DRAIN_S = 5
IDLE_S = 30
BACKLOG = 128
AT_ONCE = 256
"""Concurrent requests; uvicorn answers further ones with 503."""


class _UvicornServer(uvicorn.Server):
    """Leaves signals to rpc.runtime."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Captures no signal."""
        yield


@asynccontextmanager
async def serving_http(
    app: FastAPI,
    host: str,
    port: int,
    tls: Certificates,
    *,
    name: str = "reward registry",
    at_once: int = AT_ONCE,
) -> AsyncIterator[str]:
    """Serve `app` while the body runs; yields the address, `http://host:port`.

    Args:
        app: The app.
        host: Address to listen on.
        port: 0 picks a free one.
        tls: Certificates.
        name: Name in log lines.
        at_once: Most connections and requests; uvicorn answers further ones with 503.

    Raises:
        UserError: cannot listen on the port.
    """
    listener = _listen(host, port)
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        lifespan="off",
        ws="none",
        server_header=False,
        timeout_keep_alive=IDLE_S,
        timeout_graceful_shutdown=DRAIN_S,
        limit_concurrency=at_once,
        ssl_certfile=tls.cert,
        ssl_keyfile=tls.key,
        ssl_ca_certs=str(tls.client_ca) if tls.client_ca else None,
        ssl_cert_reqs=ssl.CERT_REQUIRED if tls.client_ca else ssl.CERT_NONE,
    )
    server = _UvicornServer(config)
    task = asyncio.create_task(server.serve(sockets=[listener]), name=f"{name} http")
    scheme = "https" if tls.cert else "http"
    address = f"{scheme}://{join_address(host, listener.getsockname()[1])}"
    log.info("%s on %s (pages: %s/docs)", name, address, address)
    try:
        yield address
        if task.done():
            raise InfraError(f"the HTTP server of the {name} ended: {task.exception()}")
    finally:
        server.should_exit = True
        await asyncio.wait({task})
        listener.close()


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        why = error.strerror or str(error)
        raise UserError(f"cannot listen on {join_address(host, port)}: {why}") from error
    return listener
