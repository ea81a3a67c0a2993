"""The port of a library: one GPU and one NCCL as a single process sees them, in raw pointers on one stream.

`libraries/cupy.py` is the real one; tests have one of sockets, for machines without a GPU. Collectives and copies
are enqueued and return at once, `join` does not: it blocks until every rank has joined, and only the end of the
process ends it. Failures are RuntimeError, or KeyError where cupy has no name for NCCL's answer.
"""

from __future__ import annotations

import mmap
import re
from collections.abc import Callable
from typing import Protocol

from meshrl.common.plugins import load

LIBRARIES = "meshrl.weights.nccl.libraries"
UNIQUE_ID_BYTES = 128


class Host(Protocol):
    """Host memory that another process shares, pinned."""

    def close(self) -> None:
        """Undo the pinning; nothing may be enqueued on it."""
        ...


class Buffer(Protocol):
    """Device memory."""

    def load(self, host: Host, at: int, nbytes: int) -> None:
        """Enqueue host to device."""
        ...

    def store(self, host: Host, at: int, nbytes: int) -> None:
        """Enqueue device to host."""
        ...

    def close(self) -> None:
        """Free it; nothing may be enqueued on it."""
        ...


class Communicator(Protocol):
    """One rank among `size`."""

    def warm_up(self) -> None:
        """Enqueue an all-reduce of one float32, which every rank does before anything else."""
        ...

    def broadcast(self, buffer: Buffer, nbytes: int, root: int) -> None:
        """Enqueue a broadcast of uint8[nbytes] from the root's device memory into that of all ranks."""
        ...

    def check(self) -> None:
        """Raise an asynchronous error of any rank that NCCL has noticed; never blocks."""
        ...

    def abort(self) -> None:
        """End all that is enqueued, and the communicator; idempotent.

        The only way to end it: `destroy`, and cupy's destructor with it, may wait for a rank that is dead.
        """
        ...


class Library(Protocol):
    """One GPU and one NCCL. Raises ConfigError when this process cannot use them."""

    version: str
    """Version of NCCL, such as 2.30.7."""
    memory: str
    """The kind of handles that `lent` opens: cuda, or stub."""

    def __init__(self, device: int) -> None: ...

    def unique_id(self) -> bytes:
        """Name a new communicator, bytes[128]; this process must live until every rank has joined."""
        ...

    def join(self, size: int, unique_id: bytes, rank: int) -> Communicator:
        """Join the other ranks. Blocks for ever when one does not join."""
        ...

    def host(self, memory: mmap.mmap) -> Host:
        """Pin `memory`; after `join`."""
        ...

    def buffer(self, nbytes: int) -> Buffer:
        """Device memory; after `join`."""
        ...

    def gpu(self) -> str:
        """The device, by its PCI address; after `join`. Empty where it makes no digests: nothing is to be lent."""
        ...

    def lent(self, handle: bytes, nbytes: int) -> Buffer:
        """Memory of this device that another process has lent; after `join`. `close` gives it back."""
        ...

    def digest(self, buffer: Buffer, nbytes: int) -> str:
        """The chunk digest (`meshrl.common.chunk_digest`) of what is there now; blocks."""
        ...

    def mark(self) -> Callable[[], bool]:
        """Put an event behind what is enqueued; the function returns whether the device has reached it."""
        ...


def load_library(name: str, device: int) -> Library:
    """Raises ConfigError for an unknown one, or one that cannot work here."""
    kind: type[Library] = load(LIBRARIES, name, "Library")
    return kind(device)


def dotted(code: int) -> str:
    """22907 is 2.29.7; before 2.9 the minor version had one digit: 2804 is 2.8.4."""
    major = code // 10000 or code // 1000
    rest = code - major * (10000 if code >= 10000 else 1000)
    return f"{major}.{rest // 100}.{rest % 100}"


def loaded_nccl(maps: str) -> set[str]:
    """The files of libnccl among the lines of a /proc/<pid>/maps; its plugins (libnccl-net) are none."""
    paths = (line.split(maxsplit=5)[5:] for line in maps.splitlines())
    return {path[0] for path in paths if path and re.search(r"/libnccl\.so[.\d]*$", path[0])}
