"""The `tls:` section of a recipe: certificates of services and clients. Imports no gRPC."""

from __future__ import annotations

from pathlib import Path

from pydantic import model_validator

from meshrl.contract.certificates import Certificates
from meshrl.contract.config import Config


class TlsConfig(Config):
    """Certificates, as PEM files. With none, connections are not encrypted."""

    cert: Path | None = None
    """What a service shows, and a client where `client_ca` asks for it; its names must cover the hosts dialled."""
    key: Path | None = None
    """Of `cert`."""
    ca: Path | None = None
    """Whose signature a client wants on a service's certificate; null: the machine's own authorities."""
    client_ca: Path | None = None
    """Whose signature a service wants on a client's certificate (mutual TLS); null asks for none."""

    @model_validator(mode="after")
    def _fits(self) -> TlsConfig:
        _ = self.certificates
        return self

    @property
    def certificates(self) -> Certificates:
        """As those who listen and dial want them."""
        return Certificates(cert=self.cert, key=self.key, ca=self.ca, client_ca=self.client_ca)
