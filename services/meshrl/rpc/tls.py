"""TLS for every connection of the mesh: both ends of gRPC, and HTTP, configured by one section of the recipe.

A process calls `use` once when it starts. Clients open connections with `channel`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Final

import grpc

from meshrl.contract.certificates import Certificates
from meshrl.contract.errors import ConfigError
from meshrl.contract.files import check_private_file

TOKEN_VARIABLE: Final = "MESHRL_TOKEN"
"""The bearer token that this process sends with every call."""


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


def channel(address: str, options: Sequence[tuple[str, Any]] = ()) -> grpc.aio.Channel:
    """A channel to a service of the mesh, with the certificates of `use` or the environment (MESHRL_TLS_CA, ...)."""
    credentials = _credentials()
    if credentials is None:
        return grpc.aio.insecure_channel(address, options=options)
    return grpc.aio.secure_channel(address, credentials, options=options)


def blocking_channel(address: str, options: Sequence[tuple[str, Any]] = ()) -> grpc.Channel:
    """As `channel`, for a thread without an event loop."""
    credentials = _credentials()
    if credentials is None:
        return grpc.insecure_channel(address, options=options)
    return grpc.secure_channel(address, credentials, options=options)


def _credentials() -> grpc.ChannelCredentials | None:
    tls = _in_use if _in_use.on else _from_environment()
    if not tls.on:
        return None
    return grpc.ssl_channel_credentials(
        root_certificates=_pem(tls, "ca"),
        private_key=_pem(tls, "key"),
        certificate_chain=_pem(tls, "cert"),
    )


def add_port(server: grpc.aio.Server, address: str, tls: Certificates) -> int:
    """Bind `address`, with TLS if there is a certificate. Returns the port, 0 on failure."""
    key, cert = _pem(tls, "key"), _pem(tls, "cert")
    if key is None or cert is None:
        return server.add_insecure_port(address)
    credentials = grpc.ssl_server_credentials(
        [(key, cert)], root_certificates=_pem(tls, "client_ca"), require_client_auth=tls.mutual
    )
    return server.add_secure_port(address, credentials)


def call_metadata() -> tuple[tuple[str, str], ...]:
    """The metadata that a client sends with every call: its token, if it has one."""
    token = os.environ.get(TOKEN_VARIABLE)
    return (("authorization", f"Bearer {token}"),) if token else ()


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
