"""The `reward.registry:` section of a recipe: what may be submitted, by whom, and where versions are stored."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from pydantic import Field, PositiveInt

from meshrl.common.config import Config


class RegistryConfig(Config):
    """Submitted reward functions: limits, servers and access."""

    name: str = Field(default="reward", pattern=r"^[a-z0-9][a-z0-9._-]{0,63}$")
    """The submitted name that scores the run: its current version, as soon as there is one; before that, the
    functions of this recipe."""
    dir: Path | None = None
    """Folder of versions and names; null is `<run.dir>/rewards`."""
    http_port: int | None = Field(default=0, ge=0, le=65535)
    """Of the HTTP server, on the service's own host; 0 picks a free one, null starts no HTTP server."""
    tokens: Path | None = None
    """A YAML file of tokens (`meshrl reward token` writes its lines). They count beside the credentials
    of the run, and alone beyond loopback, where mutual TLS is the other choice."""
    allowed_hosts: list[str] = Field(default_factory=list)
    """Names by which clients call the HTTP server, besides `localhost`, its own host and IP addresses; a request for
    another Host is refused."""
    allowed_dependencies: list[str] = Field(default_factory=list)
    """Packages that a submission may depend on, by name."""
    max_versions: PositiveInt = Field(default=1000, exclude=True)
    """Versions stored in all. The oldest that no name ever pointed to makes room, else a submission is refused."""

    requests_per_minute: ClassVar[float] = 1200.0
    """Requests of one caller, over HTTP and gRPC together."""
    max_request_bytes: ClassVar[int] = 32 << 20
    """Size of one whole HTTP request. A wheel travels as base64, a third larger than it is."""
    max_source_bytes: ClassVar[int] = 1 << 20
    """Size of a submitted Python file."""
    max_wheel_bytes: ClassVar[int] = 16 << 20
    """Size of a submitted wheel, packed."""
    max_unpacked_bytes: ClassVar[int] = 64 << 20
    """Size of a submitted wheel, unpacked."""
    max_tests: ClassVar[int] = 256
    """Tests of one submission."""
    submissions_per_minute: ClassVar[float] = 60.0
    """Submissions of one caller."""
    keep_samples: ClassVar[int] = 4096
    """Scored samples that are kept in memory, for `compare`; the newest stay."""
