"""This host's memory folder, /dev/shm: files that one process writes and others map, locked while their owner lives.

Two processes share it when they run under one kernel (the same boot id) and both open the same file there. A
container with a /dev/shm of its own and a process of another user cannot. Used by `carriers/shm.py`.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import re
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

from meshrl.contract.errors import CapacityError, CorruptError, UserError

FOLDER: Final = Path("/dev/shm")
PROBES: Final = "meshrl-*.arena"
_PROBE: Final = re.compile(r"meshrl-[0-9a-f]{16}\.arena")

Mapped: TypeAlias = mmap.mmap | memoryview
"""The bytes of a mapped file."""


class SharedMemory:
    """A memory folder as one process sees it."""

    def __init__(self, folder: Path = FOLDER) -> None:
        """Opens nothing."""
        self.folder = folder

    def create(self, name: str, nbytes: int) -> int:
        """Make a file with all its room, locked until it is closed or this process dies; its descriptor.

        Raises OSError.
        """
        path = self.folder / name
        path.unlink(missing_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        descriptor = os.open(path, flags, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)  # waits only while another process sweeps
            os.posix_fallocate(descriptor, 0, nbytes)
        except OSError:
            self.delete(name)
            os.close(descriptor)
            raise
        return descriptor

    def write(self, descriptor: int, at: int, content: memoryview) -> None:
        """Write at an offset. Raises OSError when the memory is full (a mapping would get SIGBUS)."""
        while content:
            written = os.pwrite(descriptor, content, at)
            content, at = content[written:], at + written

    def close(self, descriptor: int) -> None:
        """Give the lock back."""
        os.close(descriptor)

    def delete(self, name: str) -> None:
        """Take the file's name away; those that have mapped or opened it keep it."""
        (self.folder / name).unlink(missing_ok=True)

    def map(self, name: str, nbytes: int) -> Mapped:
        """The file's bytes, private: what is written there changes no other mapping.

        Raises:
            CorruptError: there is no such file, or it has another size.
        """
        path = self.folder / name
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as error:
            raise CorruptError(f"{path}: {error.strerror}") from error
        try:
            actual = os.fstat(descriptor).st_size
            if actual != nbytes:  # reading past the end of a shorter file raises SIGBUS
                raise CorruptError(f"{path}: {actual} bytes, the manifest says {nbytes}")
            return mmap.mmap(descriptor, nbytes, access=mmap.ACCESS_COPY)
        finally:
            os.close(descriptor)

    def owns(self, name: str) -> bool:
        """Whether this process's user has such a file here."""
        try:
            descriptor = os.open(self.folder / name, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return False
        try:
            return os.fstat(descriptor).st_uid == os.geteuid()
        finally:
            os.close(descriptor)

    def sweep(self, pattern: str) -> list[str]:
        """Delete this user's files whose owner, who held a lock on each, is dead; their names. Never raises."""
        deleted = []
        for path in self.folder.glob(pattern):
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


@dataclass(frozen=True, slots=True)
class Offer:
    """Names a probe file, so that a process elsewhere can check whether it shares our memory folder."""

    boot_id: str
    name: str

    def is_reachable(self, memory: SharedMemory) -> bool:
        """Whether this process can open the probe. Raises UserError for what is not the name of a probe."""
        if not _PROBE.fullmatch(self.name):
            raise UserError(f"{self.name!r} is not the name of a probe file")
        return bool(self.boot_id) and self.boot_id == boot_id() and memory.owns(self.name)


class Probe:
    """A small file in the memory folder, locked and kept until `close`."""

    def __init__(self, memory: SharedMemory) -> None:
        """Delete the probes of dead processes, then make a new one.

        Raises:
            CapacityError: there is no such folder, or no space in it.
        """
        memory.sweep(PROBES)
        self._memory = memory
        self._name = f"meshrl-{secrets.token_hex(8)}.arena"
        try:
            self._descriptor = memory.create(self._name, 1)
        except OSError as error:
            raise CapacityError(f"no shared memory in {memory.folder}: {error.strerror}") from error
        try:
            memory.write(self._descriptor, 0, memoryview(b"\0"))
        except OSError as error:
            self.close()
            raise CapacityError(f"no space in {memory.folder}: {error.strerror}") from error

    @property
    def offer(self) -> Offer:
        """The offer that another process tests with `Offer.is_reachable`."""
        return Offer(boot_id(), self._name)

    def close(self) -> None:
        """Delete the file. Idempotent."""
        if self._descriptor >= 0:
            self._memory.delete(self._name)
            self._memory.close(self._descriptor)
            self._descriptor = -1


def boot_id() -> str:
    """The id of the running kernel; empty where it cannot be read."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
