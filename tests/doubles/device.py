"""Stands in for a GPU: device memory is a locked file in /dev/shm, a handle is its name. For tests and dry runs."""

from __future__ import annotations

import fcntl
import mmap
import os
import re
import secrets
from typing import TYPE_CHECKING

from meshrl.contract.errors import ConfigError
from meshrl.weights.shared_memory import FOLDER, SharedMemory

if TYPE_CHECKING:  # a process of a rank imports this file, and starts often
    from meshrl.config.weights import IpcConfig
    from meshrl.contract.types import Uint8

GPU = "0000:00:00.0"
PATTERN = "meshrl-*.device"
_NAME = re.compile(r"meshrl-[0-9a-f]{16}\.device")


def open_device(config: IpcConfig, gpu: str | None) -> StubDevice:
    """Raises ConfigError for another GPU than the only one."""
    if gpu not in (None, GPU):
        raise ConfigError(f"weights.carrier=cuda_ipc: GPU {gpu}, the trainer's, is not seen here")
    SharedMemory().sweep(PATTERN)
    return StubDevice()


class StubDevice:
    """A Device; a pointer is a file descriptor."""

    gpu = GPU

    def __init__(self) -> None:
        self._names: dict[int, str] = {}

    def allocate(self, nbytes: int) -> int:
        """A file, locked until its owner dies."""
        name = f"meshrl-{secrets.token_hex(8)}.device"
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        pointer = os.open(FOLDER / name, flags, 0o600)
        fcntl.flock(pointer, fcntl.LOCK_EX)
        os.truncate(pointer, nbytes)
        self._names[pointer] = name
        return pointer

    def export(self, pointer: int) -> bytes:
        """Its name."""
        return self._names[pointer].encode()

    def write(self, pointer: int, host: Uint8) -> None:
        """Pwrite."""
        if os.pwrite(pointer, host.data, 0) != host.nbytes:
            raise RuntimeError("short write")

    def free(self, pointer: int) -> None:
        """Unlink."""
        (FOLDER / self._names.pop(pointer)).unlink(missing_ok=True)
        os.close(pointer)

    def open(self, handle: bytes) -> int:
        """Open the file of that name."""
        return _open(handle, os.O_RDONLY)

    def read(self, pointer: int, host: Uint8) -> None:
        """Preadv."""
        if os.preadv(pointer, [host.data], 0) != host.nbytes:
            raise RuntimeError("short read")

    def close(self, pointer: int) -> None:
        """Close the descriptor."""
        os.close(pointer)


def opened(handle: bytes, nbytes: int) -> mmap.mmap:
    """Memory of another process, to write in. Raises RuntimeError."""
    descriptor = _open(handle, os.O_RDWR)
    try:
        return mmap.mmap(descriptor, nbytes)
    except ValueError as error:
        raise RuntimeError(f"invalid handle: {error}") from error
    finally:
        os.close(descriptor)


def _open(handle: bytes, how: int) -> int:
    if not _NAME.fullmatch(handle.decode("ascii", "replace")):
        raise RuntimeError(f"{handle!r} is no handle")
    try:
        return os.open(FOLDER / handle.decode(), how | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        raise RuntimeError(f"invalid handle: {error.strerror}") from error
