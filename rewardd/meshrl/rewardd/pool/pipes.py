"""Pipes to a child process on any event loop. We close the file descriptors ourselves, exactly once.

The transports of asyncio and uvloop disagree on who closes the descriptor of a pipe whose other end has closed, and
closing a number twice may close another file that has got it since.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import IO

CHUNK = 1 << 16


class PipeReader:
    """Calls `on_data` with each chunk that arrives and once, with an empty one, at the end."""

    def __init__(self, file: IO[bytes], on_data: Callable[[bytes], None]) -> None:
        self._file = file
        self._fd = file.fileno()
        self._on_data = on_data
        self._loop = asyncio.get_running_loop()
        self._open = True
        os.set_blocking(self._fd, False)
        self._loop.add_reader(self._fd, self._readable)

    def _readable(self) -> bool:
        """Read one chunk; False when there is none, now or ever."""
        try:
            data = os.read(self._fd, CHUNK)
        except BlockingIOError:
            return False
        if not data:
            self._loop.remove_reader(self._fd)
        self._on_data(data)
        return bool(data)

    def close(self, drain: int = 16) -> None:
        """Read at most `drain` chunks that have arrived already, then close. Idempotent."""
        if not self._open:
            return
        self._open = False
        self._loop.remove_reader(self._fd)
        while drain > 0 and self._readable():
            drain -= 1
        self._loop.remove_reader(self._fd)
        self._file.close()


class PipeWriter:
    """Buffers what the pipe does not accept at once. Ignores a closed other end: the reader notices it."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._fd = file.fileno()
        self._loop = asyncio.get_running_loop()
        self._open = True
        self._buffer = bytearray()
        os.set_blocking(self._fd, False)

    def write(self, data: bytes) -> None:
        """Never blocks."""
        if self._open:
            waiting = bool(self._buffer)
            self._buffer += data
            if not waiting:
                self._flush()

    def _flush(self) -> None:
        try:
            while self._buffer:
                del self._buffer[: os.write(self._fd, self._buffer[: 4 * CHUNK])]
        except BlockingIOError:
            self._loop.add_writer(self._fd, self._flush)
        except BrokenPipeError:
            self.close()
        else:
            self._loop.remove_writer(self._fd)

    def close(self) -> None:
        """Drop the rest of the buffer. Idempotent."""
        if self._open:
            self._open = False
            self._loop.remove_writer(self._fd)
            self._buffer.clear()
            self._file.close()
