"""Names of checkpoints, and which of them stay when a newer one is durable."""

from __future__ import annotations

import re
from dataclasses import dataclass

from meshrl.contract.types import Version

_NAME = re.compile(r"step-(\d+)-epoch-(\d+)")


def name_of(version: Version) -> str:
    """The name of a checkpoint's directory."""
    return f"step-{version.step:08d}-epoch-{version.epoch:04d}"


def version_of(name: str) -> Version | None:
    """The version of a checkpoint by its directory's name; None: it is no checkpoint's."""
    found = _NAME.fullmatch(name)
    return Version(int(found[2]), int(found[1])) if found else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Keep:
    """Which checkpoints stay when a newer one is durable."""

    newest: int
    """How many of the newest."""
    every: int | None = None
    """All whose step is a multiple of this stay as well."""

    def drops(self, versions: list[Version]) -> list[Version]:
        """Versions to delete; `versions` are in order, newest first."""
        old = versions[self.newest :]
        return [v for v in old if self.every is None or v.step % self.every]
