"""The `tls:` section of a recipe: certificates of services and clients. Imports no gRPC."""

from __future__ import annotations

from pathlib import Path

from pydantic import model_validator

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
        if (self.cert is None) != (self.key is None):
            raise ValueError("cert and key go together")
        if self.client_ca is not None and self.cert is None:
            raise ValueError("client_ca needs cert and key")
        return self

    @property
    def on(self) -> bool:
        """True when connections are encrypted."""
        return self.cert is not None or self.ca is not None

    @property
    def mutual(self) -> bool:
        """True when a client without a certificate is refused."""
        return self.client_ca is not None
