"""Which processes share this host's memory folder, /dev/shm, and the files that dead processes leave there.

Two processes share it when they run under one kernel (the same boot id) and both open the same file there. A
container with a /dev/shm of its own and a process of another user cannot. Used by `carriers/shm.py`.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from meshrl.contract.errors import CapacityError, UserError

FOLDER: Final = Path("/dev/shm")
_PROBES: Final = "meshrl-*.arena"
_PROBE: Final = re.compile(r"meshrl-[0-9a-f]{16}\.arena")


@dataclass(frozen=True, slots=True)
class Offer:
    """Names a probe file, so that a process elsewhere can check whether it shares our memory folder."""

    boot_id: str
    name: str

    def is_reachable(self, folder: Path = FOLDER) -> bool:
        """Whether this process can open the probe. Raises UserError for what is not the name of a probe."""
        if not _PROBE.fullmatch(self.name):
            raise UserError(f"{self.name!r} is not the name of a probe file")
        if not self.boot_id or self.boot_id != boot_id():
            return False
        try:
            descriptor = os.open(folder / self.name, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return False
        try:
            return os.fstat(descriptor).st_uid == os.geteuid()
        finally:
            os.close(descriptor)


class Probe:
    """A small file in the memory folder, locked and kept until `close`. Made by `create`."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self._path = path
        self._descriptor = descriptor

    @classmethod
    def create(cls, folder: Path = FOLDER) -> Self:
        """Delete the probes of dead processes, then make a new one.

        Raises:
            CapacityError: there is no such folder, or no space in it.
        """
        sweep(folder, _PROBES)
        path = folder / f"meshrl-{secrets.token_hex(8)}.arena"
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise CapacityError(f"no shared memory in {folder}: {error.strerror}") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)  # waits only while another process sweeps
            os.posix_fallocate(descriptor, 0, 1)
        except OSError as error:
            path.unlink(missing_ok=True)
            os.close(descriptor)
            raise CapacityError(f"no space in {folder}: {error.strerror}") from error
        return cls(path, descriptor)

    @property
    def offer(self) -> Offer:
        """What another process needs for `Offer.is_reachable`."""
        return Offer(boot_id(), self._path.name)

    def close(self) -> None:
        """Delete the file. Idempotent."""
        if self._descriptor >= 0:
            self._path.unlink(missing_ok=True)
            os.close(self._descriptor)
            self._descriptor = -1


def boot_id() -> str:
    """The id of the running kernel; empty where it cannot be read."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def sweep(folder: Path, pattern: str) -> list[str]:
    """Delete this user's files whose owner, who held a lock on each, is dead; their names. Never raises."""
    deleted = []
    for path in folder.glob(pattern):
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # A new file is locked right after it is made: leave an empty one to the next sweep.
            if os.fstat(descriptor).st_size:
                path.unlink(missing_ok=True)
                deleted.append(path.name)
        except OSError:
            pass
        finally:
            os.close(descriptor)
    return deleted
