"""Counts the bytes of a version that a processor copies in this process; locks and messages are left out."""

from __future__ import annotations

from typing import Any

import numpy as np

from meshrl.weights.shared_memory import SharedMemory

LEAST = 1 << 10
"""Bytes: what is smaller is no bucket."""


class Copies:
    """From `install` on."""

    def __init__(self) -> None:
        self._bytes = 0

    def install(self) -> None:
        """Wrap the two ways in which the weight plane copies: numpy's, and writes to /dev/shm."""
        copyto, write = np.copyto, SharedMemory.write

        def counted_copyto(into: Any, content: Any) -> None:
            self._count(content.nbytes)
            copyto(into, content)

        def counted_write(memory: SharedMemory, descriptor: int, at: int, content: Any) -> None:
            self._count(content.nbytes)
            write(memory, descriptor, at, content)

        np.copyto = counted_copyto  # type: ignore[assignment]
        SharedMemory.write = counted_write  # type: ignore[method-assign, assignment]

    def take(self) -> int:
        """Bytes since the last time."""
        found, self._bytes = self._bytes, 0
        return found

    def _count(self, nbytes: int) -> None:
        self._bytes += nbytes if nbytes >= LEAST else 0
