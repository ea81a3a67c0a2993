"""Accepts TCP connections within limits that hold before anything is parsed or authenticated: for HTTP and metrics.

A connection is busy while a request of it runs, else idle: in its TLS handshake, half a request long, or kept alive.
At a limit the oldest idle one makes room, so that only running requests hold places. Who begins a request has
`header_s` to finish its headers.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import ssl
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final, TypeAlias, TypeVar

from meshrl.common.certificates import Certificates
from meshrl.common.files import check_private_file
from meshrl.common.sockets import join_address
from meshrl.contract.errors import ConfigError, UserError
from meshrl.rpc.credentials import RELOAD_S, Reloaded
from meshrl.rpc.errors import PortInUseError

log = logging.getLogger(__name__)

T = TypeVar("T")

HEADER_S: Final = 10.0
BACKLOG: Final = 128
OVERFLOW: Final = 32
"""Connections beyond the limit that the protocol may still answer, to say that there are too many."""
ACCEPT_AGAIN_S: Final = 1.0
"""Pause after a connection that could not be accepted, for example because no file descriptor is left."""


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """How many connections a server holds, and how long one may take to say what it wants."""

    total: int
    """From all peers."""
    header_s: float = HEADER_S
    """Seconds for a TLS handshake, and for the headers of a request."""

    @property
    def per_peer(self) -> int:
        """From one address: three quarters of all, so that others find room."""
        return max(1, self.total * 3 // 4)


class Connection:
    """One accepted connection; its protocol says what it does."""

    def __init__(self, acceptor: Acceptor, peer: str) -> None:
        self.peer = peer
        self.busy = False
        self._acceptor = acceptor
        self._transport: asyncio.Transport | None = None
        self._opening: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.awaits()

    def awaits(self) -> None:
        """Part of a request, or nothing yet, came: the rest has `header_s`."""
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._acceptor.limits.header_s, self.close)

    def begins(self) -> None:
        """A request runs."""
        self.busy = True
        self._stop_timer()

    def ends(self) -> None:
        """The request is answered; how long the connection stays open is the protocol's matter."""
        self.busy = False
        self._stop_timer()
        self._acceptor.idles(self)

    def opens(self, transport: asyncio.Transport) -> None:
        """The protocol has its transport."""
        self._transport = transport

    def close(self) -> None:
        """End it now."""
        if self._transport is not None:
            self._transport.abort()
        elif self._opening is not None:
            self._opening.cancel()
        self.lost()

    def lost(self) -> None:
        """It is closed. Idempotent."""
        self._stop_timer()
        self._acceptor.forget(self)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def open(
        self, accepted: socket.socket, make: MakeProtocol, tls: ssl.SSLContext | None
    ) -> None:
        """Connect a protocol; the connection is lost if the TLS handshake fails."""
        self._opening = asyncio.current_task()
        options: dict[str, Any] = {}
        if tls is not None:
            options = {"ssl": tls, "ssl_handshake_timeout": self._acceptor.limits.header_s}
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: make(self), accepted, **options
            )
        except (OSError, TimeoutError) as error:  # ssl.SSLError is an OSError
            log.debug("a connection of %s was not opened: %s", self.peer, error)
            self.lost()
        except asyncio.CancelledError:
            accepted.close()
            self.lost()
            raise


ServerTls: TypeAlias = Reloaded[ssl.SSLContext]
MakeProtocol: TypeAlias = Callable[[Connection], asyncio.Protocol]
"""Makes the protocol of a connection; it calls `opens`, `awaits`, `begins`, `ends` and `lost`."""


class Acceptor:
    """Accepts the connections of one listening socket."""

    def __init__(
        self,
        listener: socket.socket,
        make: MakeProtocol,
        limits: ConnectionLimits,
        tls: ServerTls | None = None,
    ) -> None:
        """Nothing is accepted before `run`."""
        self.limits = limits
        self._listener = listener
        self._make = make
        self._tls = tls
        self._open: dict[Connection, None] = {}
        """In the order in which they became idle, or opened."""
        self._by_peer: Counter[str] = Counter()

    async def run(self) -> None:
        """Accept until cancelled; then the listening socket is closed, and open connections go on."""
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
                        opening.create_task(connection.open(accepted, self._make, tls))
        finally:
            self._listener.close()

    def close(self) -> None:
        """End every connection now."""
        for connection in list(self._open):
            connection.close()

    def idles(self, connection: Connection) -> None:
        """A connection has become idle: it is the last of those that must make room."""
        if connection in self._open:
            self._open[connection] = self._open.pop(connection)

    def forget(self, connection: Connection) -> None:
        """A connection is closed. Idempotent."""
        if connection in self._open:
            del self._open[connection]
            self._by_peer[connection.peer] -= 1
            if not self._by_peer[connection.peer]:
                del self._by_peer[connection.peer]

    def _admit(self, peer: str) -> Connection | None:
        """A connection of `peer`; None if there are too many, and all of them are busy."""
        if self._by_peer[peer] >= self.limits.per_peer and not self._make_room(peer):
            return None
        if len(self._open) >= self.limits.total:
            self._make_room(None)
        if len(self._open) >= self.limits.total + OVERFLOW:
            return None
        connection = Connection(self, peer)
        self._open[connection] = None
        self._by_peer[peer] += 1
        return connection

    def _make_room(self, peer: str | None) -> bool:
        """Close the oldest idle connection, of `peer`, or of whoever has most idle ones; False if all are busy."""
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


def certificate_names(transport: asyncio.BaseTransport) -> tuple[str, ...] | None:
    """Common name and SANs of a client's certificate; None if it has none."""
    certificate = transport.get_extra_info("peercert")
    if not certificate:
        return None
    subject = (pair for part in certificate.get("subject", ()) for pair in part)
    return (
        *(value for key, value in subject if key == "commonName"),
        *(value for _, value in certificate.get("subjectAltName", ())),
    )


def listen(host: str, port: int, cannot: str = "cannot listen on") -> socket.socket:
    """A listening socket. Raises PortInUseError, UserError; `cannot` begins the message."""
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


def server_tls(certificates: Certificates) -> ServerTls | None:
    """How a server encrypts, for each connection as the files are then; None without a certificate.

    Raises:
        ConfigError: a file is not there, is no certificate, or is a key that others may read.
    """
    if certificates.cert is None:
        return None
    return reloaded(certificates, lambda _: server_context(certificates))


def reloaded(certificates: Certificates, read: Callable[[Path], T]) -> Reloaded[T]:
    """What `read` makes of the certificates, again when one of their files changes. Raises what `read` raises."""
    paths = (getattr(certificates, file.name) for file in fields(certificates))
    first, *also = (path for path in paths if path is not None)
    return Reloaded(first, read, every_s=RELOAD_S, also=also)


def server_context(certificates: Certificates) -> ssl.SSLContext:
    """The context of a server with these certificates.

    Raises:
        ConfigError: as `server_tls`, or the key is not the certificate's.
    """
    assert certificates.cert is not None and certificates.key is not None
    check_private_file(certificates.key, "tls.key")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(certificates.cert, certificates.key)
        if certificates.client_ca is not None:
            context.load_verify_locations(certificates.client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
    except OSError as error:
        raise ConfigError(f"tls: {certificates.cert}: {error.strerror or error}") from error
    return context
