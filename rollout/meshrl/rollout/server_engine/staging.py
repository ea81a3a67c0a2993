"""The directory of staged versions, on a file system that the server can read; removes unused ones."""

from __future__ import annotations

import fcntl
import itertools
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from meshrl.contract.errors import UserError

SHARED_MEMORY = Path("/dev/shm")
PREFIX = "meshrl-staging-"
VERSIONS_AT_ONCE = 3
"""The served one (a restarted server needs it), the staged one, and the one being written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionFiles:
    """The files of one version."""

    path: Path
    temporary: bool
    """Made by `Staging`: `remove` deletes them."""
    on_device: bool = False
    """They say what lies in the server's memory; the weights are nowhere else."""

    def remove(self) -> None:
        """Free the space."""
        if self.temporary:
            shutil.rmtree(self.path, ignore_errors=True)


class Staging:
    """A staging directory of this process. Making one removes those that killed processes left behind."""

    def __init__(self, parent: Path | None, *, version_bytes: int) -> None:
        """Make it in `parent`; None: in shared memory if there is space, else in the temporary directory.

        Raises:
            UserError: the directory cannot be made there.
        """
        if parent is None:
            parent = Path(tempfile.gettempdir())
            need = VERSIONS_AT_ONCE * version_bytes
            if SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free > need:
                parent = SHARED_MEMORY
        _remove_abandoned(parent)
        try:
            self._path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        except OSError as error:
            raise UserError(f"rollout.engine.staging {parent}: {error.strerror}") from error
        self._path.chmod(0o755)  # the server may run as another user
        self._lock = (self._path / "lock").open("w")
        _lock(self._lock)
        self._names = itertools.count()

    def new(self, *, on_device: bool = False) -> VersionFiles:
        """A path for one version, not created yet."""
        path = self._path / str(next(self._names))
        return VersionFiles(path=path, temporary=True, on_device=on_device)

    def close(self) -> None:
        """Remove everything; idempotent."""
        shutil.rmtree(self._path, ignore_errors=True)
        self._lock.close()


def _remove_abandoned(parent: Path) -> None:
    """Remove directories whose lock is free: their process has ended, in whatever container it ran."""
    for path in parent.glob(f"{PREFIX}*"):
        try:
            with (path / "lock").open("r+") as lock:
                if _lock(lock):
                    shutil.rmtree(path, ignore_errors=True)
        except OSError:
            continue  # being made or removed at this moment, or owned by another user


def _lock(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
