"""The certificates of a process. A client needs them too, so this imports neither gRPC nor any recipe."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificates:
    """PEM files; the `tls:` section of a recipe says what each is for. With none, connections are not encrypted.

    Raises:
        ValueError: some do not make sense without others.
    """

    cert: Path | None = None
    key: Path | None = None
    ca: Path | None = None
    client_ca: Path | None = None

    def __post_init__(self) -> None:
        if (self.cert is None) != (self.key is None):
            raise ValueError("cert and key go together")
        if self.client_ca is not None and self.cert is None:
            raise ValueError("client_ca needs cert and key")

    @property
    def on(self) -> bool:
        """True when connections are encrypted."""
        return self.cert is not None or self.ca is not None

    @property
    def mutual(self) -> bool:
        """True when a client without a certificate is refused."""
        return self.client_ca is not None
