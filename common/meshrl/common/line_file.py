"""A file of lines that grows at its end, and is moved aside when it is full: `x.log`, before it `x.log.1`, ..."""

from __future__ import annotations

import os
from collections import deque
from contextlib import suppress
from itertools import count
from pathlib import Path

from meshrl.common.files import sync

MOST_KEPT = 10_000
"""Lines that wait in memory for a disk that takes nothing; of more, the oldest are lost."""


class LineFile:
    """Appends whole lines to `path`; one process at a time does.

    A kill at any moment loses no line that was written: what is appended is with the kernel at once, and a full file
    is only renamed. A line that a kill or a power cut has left without an end is ended by the next. While the disk
    refuses to have the file moved aside, it grows on.
    """

    def __init__(
        self,
        path: Path,
        *,
        max_bytes: int = 0,
        keep: int | None = None,
        durable: bool = False,
        mode: int = 0o666,
    ) -> None:
        """Nothing is opened before the first line.

        Args:
            path: The file; its folder is made.
            max_bytes: A line that would make the file longer moves it aside first. 0: never.
            keep: How many files that were moved aside stay, the newest ones; None: all.
            durable: Whether a line is on the disk when `write` returns.
            mode: Of the files, less the umask.
        """
        self._path = path
        self._max_bytes = max_bytes
        self._keep = keep
        self._durable = durable
        self._mode = mode
        self._file = -1
        self._size = 0
        self._refused: deque[str] = deque(maxlen=MOST_KEPT)

    @property
    def size(self) -> int:
        """Bytes of the file that is written."""
        return self._size

    def open(self) -> None:
        """Open the file. Idempotent; `write` does it too.

        Raises:
            OSError: it cannot be opened.
        """
        if self._file >= 0:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._use(self._opened())
        if self._size and os.pread(self._file, 1, self._size - 1) != b"\n":
            self._append(b"\n")

    def write(self, line: str) -> None:
        """Write one line.

        Raises:
            OSError: the disk refuses. Nothing of the line is in the file then.
        """
        self.open()
        data = line.encode(errors="backslashreplace") + b"\n"
        if self._max_bytes and self._size and self._size + len(data) > self._max_bytes:
            with suppress(OSError):
                self._move_aside()
        self._append(data)

    def write_or_keep(self, line: str) -> OSError | None:
        """Write one line, after those that the disk has refused before; why it must wait, and is kept until then."""
        self._refused.append(line)
        try:
            while self._refused:
                self.write(self._refused[0])
                self._refused.popleft()
        except OSError as error:
            return error
        return None

    def close(self) -> None:
        """Idempotent."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _opened(self) -> int:
        return os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, self._mode)

    def _use(self, file: int) -> None:
        self.close()
        self._file = file
        self._size = os.fstat(file).st_size

    def _append(self, data: bytes) -> None:
        written = 0
        try:
            while written < len(data):
                written += os.write(self._file, data[written:])
            if self._durable:
                os.fsync(self._file)
        except OSError:
            # Half a line would be taken for one. To make a file shorter needs no space.
            os.ftruncate(self._file, self._size)
            raise
        self._size += len(data)

    def _move_aside(self) -> None:
        """Rename the file and those before it, and open the next one.

        A kill, or a refusal, leaves at worst no file of the first name, and all others: then only the rest is done.
        """
        if self._path.exists():
            free = next(
                number
                for number in count(1)
                if number == self._keep or not moved_aside(self._path, number).exists()
            )
            for number in range(free, 0, -1):
                moved_aside(self._path, number - 1).replace(moved_aside(self._path, number))
        self._use(self._opened())
        if self._durable:
            sync(self._path.parent)


def moved_aside(path: Path, number: int) -> Path:
    """The file that was moved aside as the last but `number` - 1; 0 is the file itself."""
    return path.with_name(f"{path.name}.{number}") if number else path
