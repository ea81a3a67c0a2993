"""The connections of the mesh: TLS for both ends of gRPC and for HTTP, and the credential that every call carries.

A process calls `use` and `credentials.use` once when it starts. Clients open connections with `channel`.

No credential goes to another machine unencrypted, unless MESHRL_ALLOW_INSECURE_BIND says that the network is trusted.
"""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeAlias, TypeVar, cast

import grpc

from meshrl.common.files import check_private_file
from meshrl.common.sockets import TRUSTED_VARIABLE, Certificates, stays_here, trusts_network
from meshrl.contract.errors import ConfigError, UserError
from meshrl.rpc import credentials
from meshrl.rpc.credentials import RELOAD_S, Credential, Metadata, Reloaded

CA_VARIABLE: Final = "MESHRL_TLS_CA"
PROXY: Final = "MESHRL_GRPC_PROXY"
"""The variable that names a proxy for the mesh's own connections: `http://host:port`."""

T = TypeVar("T")
ServerTls: TypeAlias = Reloaded[ssl.SSLContext]

_in_use = Certificates()


def use(tls: Certificates) -> None:
    """Set the certificates of this process's connections. Empty certificates change nothing.

    Raises:
        ConfigError: a file cannot be read.
    """
    global _in_use
    for file in fields(tls):
        _pem(tls, file.name)
    if tls.on:
        _in_use = tls


def in_use() -> Certificates:
    """The certificates of this process, as set by `use`."""
    return _in_use


def channel(
    address: str, options: Sequence[tuple[str, Any]] = (), credential: Credential | None = None
) -> grpc.aio.Channel:
    """A channel to a service of the mesh, with the certificates of `use` or the environment (MESHRL_TLS_CA, ...).

    It goes through no proxy but one that MESHRL_GRPC_PROXY names: those of the environment lead out of the mesh.
    Every call through it carries `credential`, or the one of this process.

    Raises:
        UserError: it would travel unencrypted to another machine in a network that is not declared trusted.
    """
    source = credential or credentials.in_use()
    return cast("grpc.aio.Channel", _open(grpc.aio, address, options, source))


def blocking_channel(
    address: str, options: Sequence[tuple[str, Any]] = (), credential: Credential | None = None
) -> grpc.Channel:
    """A `channel` for a thread without an event loop."""
    source = credential or credentials.in_use()
    return cast("grpc.Channel", _open(grpc, address, options, source))


def health_channel(address: str) -> grpc.aio.Channel:
    """A channel without a credential: for health, which needs none, and is asked before the server is known."""
    return cast("grpc.aio.Channel", _open(grpc.aio, address, (), None))


def _open(
    library: Any, address: str, options: Sequence[tuple[str, Any]], source: Credential | None
) -> Any:
    proxy = os.environ.get(PROXY)
    options = (*options, ("grpc.http_proxy", proxy) if proxy else ("grpc.enable_http_proxy", 0))
    tls = _in_use if _in_use.on else _from_environment()
    if tls.on:
        open_with = partial(library.secure_channel, address, options=options)
        return _Channel(open_with, reloaded(tls, lambda _: _channel_credentials(tls)), source)
    if source is not None and not stays_here(address) and not trusts_network():
        raise UserError(
            f"a credential would travel to {address} unencrypted: set tls in the recipe (or {CA_VARIABLE} for a"
            f" command), or {TRUSTED_VARIABLE}=1 in a network that you trust",
            address=address,
        )
    opened = library.insecure_channel(address, options=options)
    return opened if source is None else _Channel(lambda _: opened, None, source)


class _Channel:
    """A channel whose calls carry a credential, and start with the certificates that the files hold then.

    Not with gRPC's interceptors: grpc.aio makes tasks of every intercepted call, which costs more than a small call.
    """

    def __init__(
        self,
        open_with: Callable[[grpc.ChannelCredentials | None], Any],
        certificates: Reloaded[grpc.ChannelCredentials] | None,
        credential: Credential | None,
    ) -> None:
        self._open_with = open_with
        self._certificates = certificates
        self._latest = certificates.get() if certificates is not None else None
        self._opened = [open_with(self._latest)]
        self._metadata = credential.metadata if credential is not None else tuple

    def current(self) -> Any:
        """The channel for calls that start now; those of before end on the one on which they began."""
        if self._certificates is not None:
            before, self._latest = self._latest, self._certificates.get()
            if self._latest is not before:
                self._opened.append(self._open_with(self._latest))
        return self._opened[-1]

    def close(self, *grace: float | None) -> Any:
        """Close all channels; asynchronous ones return an awaitable, as gRPC's do."""
        closing = [each.close(*grace) for each in self._opened]
        return asyncio.gather(*closing) if asyncio.iscoroutine(closing[0]) else None

    def unary_unary(self, *args: Any, **kwargs: Any) -> _Method:
        return self._method("unary_unary", *args, **kwargs)

    def unary_stream(self, *args: Any, **kwargs: Any) -> _Method:
        return self._method("unary_stream", *args, **kwargs)

    def stream_unary(self, *args: Any, **kwargs: Any) -> _Method:
        return self._method("stream_unary", *args, **kwargs)

    def stream_stream(self, *args: Any, **kwargs: Any) -> _Method:
        return self._method("stream_stream", *args, **kwargs)

    def _method(self, arity: str, *args: Any, **kwargs: Any) -> _Method:
        def bind(channel: Any) -> Any:
            return getattr(channel, arity)(*args, **kwargs)

        return _Method(self.current, bind, self._metadata)

    async def __aenter__(self) -> _Channel:
        return self

    async def __aexit__(self, *raised: Any) -> None:
        await self.close(None)

    async def channel_ready(self) -> None:
        """Wait until the channel for new calls is ready."""
        await self.current().channel_ready()


class _Method:
    """A method of a stub that adds a credential to the metadata of the call."""

    def __init__(
        self,
        current: Callable[[], Any],
        bind: Callable[[Any], Any],
        metadata: Callable[[], Metadata],
    ) -> None:
        self._current = current
        self._bind = bind
        self._metadata = metadata
        self._channel = current()
        self._method = bind(self._channel)

    def __call__(
        self, *args: Any, metadata: Sequence[tuple[str, str]] | None = None, **kwargs: Any
    ) -> Any:
        return self._bound()(*args, metadata=(*self._metadata(), *(metadata or ())), **kwargs)

    def future(
        self, *args: Any, metadata: Sequence[tuple[str, str]] | None = None, **kwargs: Any
    ) -> Any:
        """Begin a call on a blocking channel."""
        every = (*self._metadata(), *(metadata or ()))
        return self._bound().future(*args, metadata=every, **kwargs)

    def _bound(self) -> Any:
        channel = self._current()
        if channel is not self._channel:
            self._channel, self._method = channel, self._bind(channel)
        return self._method


def _channel_credentials(tls: Certificates) -> grpc.ChannelCredentials:
    if tls.cert is not None:
        server_context(
            tls
        )  # refuses a key that is not the certificate's, as while only one of them is copied
    return grpc.ssl_channel_credentials(
        root_certificates=_pem(tls, "ca"),
        private_key=_pem(tls, "key"),
        certificate_chain=_pem(tls, "cert"),
    )


def add_port(server: grpc.aio.Server, address: str, tls: Certificates) -> int:
    """Bind `address`, with TLS if there is a certificate. Returns the port, 0 on failure.

    A new connection gets the certificates that the files hold then; open ones continue.
    """
    if tls.cert is None:
        return server.add_insecure_port(address)
    configuration = reloaded(tls, lambda _: _server_configuration(tls))
    given = configuration.get()

    def changed() -> Any:
        """Called by gRPC before each handshake, in a thread of its own; None: as before."""
        nonlocal given
        before, given = given, configuration.get()
        return None if given is before else given

    return server.add_secure_port(
        address, grpc.dynamic_ssl_server_credentials(given, changed, tls.mutual)
    )


def _server_configuration(tls: Certificates) -> grpc.ServerCertificateConfiguration:
    server_context(tls)  # refuses what gRPC would log only, such as another certificate's key
    key, cert = _pem(tls, "key"), _pem(tls, "cert")
    assert key is not None and cert is not None
    return grpc.ssl_server_certificate_configuration([(key, cert)], _pem(tls, "client_ca"))


def _from_environment() -> Certificates:
    files = {name: os.environ.get(f"MESHRL_TLS_{name.upper()}") for name in ("ca", "cert", "key")}
    try:
        return Certificates(**{name: Path(file) for name, file in files.items() if file})
    except ValueError as error:
        raise ConfigError("MESHRL_TLS_CERT and MESHRL_TLS_KEY must be set together") from error


def _pem(tls: Certificates, name: str) -> bytes | None:
    path: Path | None = getattr(tls, name)
    if path is None:
        return None
    if name == "key":
        check_private_file(path, "tls.key")
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"tls.{name}: {path}: {error.strerror}") from error
    if b"-----BEGIN" not in data:
        raise ConfigError(f"tls.{name}: {path} is not a PEM file")
    return data


def server_tls(certificates: Certificates) -> ServerTls | None:
    """How a server encrypts, for each connection as the files are then; None without a certificate.

    Raises:
        ConfigError: a file is not there, is no certificate, or is a key that others may read.
    """
    if certificates.cert is None:
        return None
    return reloaded(certificates, lambda _: server_context(certificates))


def reloaded(certificates: Certificates, read: Callable[[Path], T]) -> Reloaded[T]:
    """The result of `read` for the certificates, read again when a file changes. Raises what `read` raises."""
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
