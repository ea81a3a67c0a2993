"""The connections of the mesh: TLS for both ends of gRPC and for HTTP, and the credential that every call carries.

A process calls `use` and `credentials.use` once when it starts. Clients open connections with `channel`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, cast

import grpc

from meshrl.contract.certificates import Certificates
from meshrl.contract.errors import ConfigError
from meshrl.contract.files import check_private_file
from meshrl.rpc import credentials
from meshrl.rpc.connections import reloaded, server_context
from meshrl.rpc.credentials import Credential, Metadata

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

    Every call through it carries `credential`, or the one of this process.
    """
    tls = _channel_credentials()
    if tls is None:
        opened = grpc.aio.insecure_channel(address, options=options)
    else:
        opened = grpc.aio.secure_channel(address, tls, options=options)
    source = credential if credential is not None else credentials.in_use()
    return opened if source is None else cast("grpc.aio.Channel", _Channel(opened, source))


def blocking_channel(
    address: str, options: Sequence[tuple[str, Any]] = (), credential: Credential | None = None
) -> grpc.Channel:
    """As `channel`, for a thread without an event loop."""
    tls = _channel_credentials()
    if tls is None:
        opened = grpc.insecure_channel(address, options=options)
    else:
        opened = grpc.secure_channel(address, tls, options=options)
    source = credential if credential is not None else credentials.in_use()
    return opened if source is None else cast("grpc.Channel", _Channel(opened, source))


class _Channel:
    """A channel whose calls carry a credential, and as it is otherwise.

    Not with gRPC's interceptors: grpc.aio makes tasks of every intercepted call, which costs more than a small call.
    """

    def __init__(self, channel: Any, credential: Credential) -> None:
        self._channel = channel
        self._credential = credential

    def unary_unary(self, *args: Any, **kwargs: Any) -> _Method:
        return _Method(self._channel.unary_unary(*args, **kwargs), self._credential.metadata)

    def unary_stream(self, *args: Any, **kwargs: Any) -> _Method:
        return _Method(self._channel.unary_stream(*args, **kwargs), self._credential.metadata)

    def stream_unary(self, *args: Any, **kwargs: Any) -> _Method:
        return _Method(self._channel.stream_unary(*args, **kwargs), self._credential.metadata)

    def stream_stream(self, *args: Any, **kwargs: Any) -> _Method:
        return _Method(self._channel.stream_stream(*args, **kwargs), self._credential.metadata)

    async def __aenter__(self) -> _Channel:
        await self._channel.__aenter__()
        return self

    async def __aexit__(self, *raised: Any) -> None:
        await self._channel.__aexit__(*raised)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._channel, name)


class _Method:
    """A method of a stub that adds a credential to the metadata of the call."""

    def __init__(self, method: Any, credential: Callable[[], Metadata]) -> None:
        self._method = method
        self._credential = credential

    def __call__(
        self, *args: Any, metadata: Sequence[tuple[str, str]] | None = None, **kwargs: Any
    ) -> Any:
        return self._method(*args, metadata=(*self._credential(), *(metadata or ())), **kwargs)

    def future(
        self, *args: Any, metadata: Sequence[tuple[str, str]] | None = None, **kwargs: Any
    ) -> Any:
        """Of blocking channels."""
        every = (*self._credential(), *(metadata or ()))
        return self._method.future(*args, metadata=every, **kwargs)


def _channel_credentials() -> grpc.ChannelCredentials | None:
    tls = _in_use if _in_use.on else _from_environment()
    if not tls.on:
        return None
    return grpc.ssl_channel_credentials(
        root_certificates=_pem(tls, "ca"),
        private_key=_pem(tls, "key"),
        certificate_chain=_pem(tls, "cert"),
    )


def add_port(server: grpc.aio.Server, address: str, tls: Certificates) -> int:
    """Bind `address`, with TLS if there is a certificate. Returns the port, 0 on failure.

    A new connection gets the certificates that the files hold then; open ones go on.
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
