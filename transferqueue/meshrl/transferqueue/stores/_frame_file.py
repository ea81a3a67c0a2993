"""Long values of the disk store, in a file beside LMDB's, which holds only where they lie.

    commit:  values ──one write past the page cache──▶ frames.dat ──sync──▶ their places ──▶ LMDB's transaction
    open:    the places that LMDB holds are taken, all else is free: a write that no commit followed is forgotten

LMDB copies a value into pages of its own, and those into the page cache, before they reach the disk: for long values
that is most of what a commit costs. A place is used again once the commit that deleted it is done and no read or
export that began before goes on. A place carries a checksum, and what lies there has its own; so a wrong place, a
value cut short or another one is noticed by whoever reads it. The file never shrinks.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
import struct
import threading
from bisect import bisect
from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import xxhash

from meshrl.contract.errors import CorruptError
from meshrl.contract.files import sync

log = logging.getLogger(__name__)

Value: TypeAlias = bytes | memoryview
Bytes: TypeAlias = npt.NDArray[np.uint8]
NAME: Final = "frames.dat"
LONG_BYTES: Final = 128 << 10
"""Shorter values stay in LMDB."""
BLOCK: Final = 4096
"""Writes past the page cache begin and end at a multiple of it, in the file and in memory."""
GROW_BYTES: Final = 64 << 20
_RUN_BYTES: Final = 16 << 20
"""About so much is written at once."""
_RUN_VALUES: Final = 512
"""And no more values: each is one or two of the parts of a write, of which Linux takes 1,024."""
_MAGIC: Final = b"\xa7at"
_PLACE: Final = struct.Struct("<3sQQQ")


def _whole_blocks(size: int) -> int:
    """Bytes of the blocks that `size` bytes take."""
    return size + -size % BLOCK


class Place(NamedTuple):
    """Where a value lies."""

    start: int
    size: int

    @property
    def blocks(self) -> int:
        """Bytes that it takes."""
        return _whole_blocks(self.size)

    def encode(self) -> bytes:
        """As LMDB holds it."""
        return _PLACE.pack(_MAGIC, *self, self._checksum())

    def _checksum(self) -> int:
        return int(xxhash.xxh3_64_intdigest(b"%d %d" % self))

    @classmethod
    def of(cls, value: Value) -> Place | None:
        """The place that a value of LMDB says; None if it is a value itself."""
        if not _looks_like_place(value):
            return None
        _, start, size, checksum = _PLACE.unpack(value)
        place = cls(start, size)
        return place if place._checksum() == checksum else None


def _looks_like_place(value: Value) -> bool:
    return len(value) == _PLACE.size and value[: len(_MAGIC)] == _MAGIC


def is_long(value: Value) -> bool:
    """A value that does not stay in LMDB; with one that looks like a place, which would be taken for one."""
    return len(value) >= LONG_BYTES or _looks_like_place(value)


class FrameFile:
    """Changed by the store's commit thread alone; read by others."""

    def __init__(self, folder: Path) -> None:
        """The file is made with the first long value."""
        self.path: Final = folder / NAME
        self._lock: Final = threading.RLock()
        """Held while places are taken or become free, never during a read or a write."""
        self._places: dict[bytes, Place] = {}
        """By key: those that are taken, and become free when the key goes."""
        self._free: list[tuple[int, int]] = []
        """Start and size of each gap, in order; no two of them touch."""
        self._end = 0
        """Of the file, or of the last place that is taken."""
        self._readers = 0
        self._withheld: list[Place] = []
        """Not needed any more, but somebody may read them."""
        self._file = self._cached = -1
        """Past the page cache, and through it."""
        self._staging = mmap.mmap(-1, BLOCK)

    def open(self, places: Mapping[bytes, Place]) -> None:
        """Again, with what LMDB holds. Raises OSError, CorruptError."""
        with self._lock:
            if not self._readers:
                self.close()
            held = {*self._places.values(), *self._withheld} if self._readers else set()
            self._withheld = sorted(held.difference(places.values()))
            self._places = dict(places)
            self._free = []
            taken = [(place, key) for key, place in places.items()]
            at, before = 0, b""
            for place, key in sorted([*taken, *((place, b"") for place in self._withheld)]):
                if place.start < at:  # damage: what is wrong is noticed when it is read
                    self._places.pop(key, None)
                    self._places.pop(before, None)
                elif place.start > at:
                    self._free.append((at, place.start - at))
                if place.start + place.blocks > at:
                    at, before = place.start + place.blocks, key
            self._end = self.path.stat().st_size if self.path.exists() else 0
            if self._end < at:
                raise CorruptError(
                    f"{self.path} is gone or cut short: it has {self._end} bytes, and data.mdb says that values"
                    f" lie in it up to {at}: put it back, or restore a backup (meshrl queue restore)"
                )
            if self._end > at:
                self._free.append((at, self._end - at))
            if self._end and self._file < 0:
                self._open_file()

    def write(self, values: Mapping[bytes, Value]) -> dict[bytes, Place]:
        """Write the values of some keys, each to a place of its own. Raises OSError: none has one."""
        if not values:
            return {}
        if self._file < 0:
            self._open_file()
        with self._lock:
            places = dict(zip(values, self._take(map(len, values.values())), strict=True))
        try:
            for run in _runs([(places[key], value) for key, value in values.items()]):
                self._write_run(run)
        except BaseException:
            self.take_back(places)
            raise
        return places

    def sync(self) -> None:
        """Have on disk what was written. Raises OSError."""
        os.fdatasync(self._file)

    def take_back(self, places: Mapping[bytes, Place]) -> None:
        """What `write` returned: no commit followed."""
        with self._lock:
            self._give_back(places.values())

    def committed(self, keys: Iterable[bytes], places: Mapping[bytes, Place]) -> None:
        """These keys were put or deleted; of those in `places`, the value lies there. The commit is durable."""
        gone = [place for key in keys if (place := self._places.pop(key, None))]
        self._places |= places
        with self._lock:
            self._withheld += gone
            self._free_withheld()

    def read(self, value: bytes | None) -> bytes | None:
        """A value that LMDB holds, or the one to whose place it points; None if that is not there."""
        place = None if value is None else Place.of(value)
        if place is None:
            return value
        try:
            found = os.pread(self._cached, place.size, place.start)
        except OSError as error:
            log.error("%s cannot be read at %d: %s", self.path, place.start, error)
            return None
        if len(found) == place.size:
            return found
        log.error("%s ends in the middle of a value, at %d", self.path, place.start + len(found))
        return None

    def begin_reading(self) -> None:
        """From now on what is taken stays as it is. Call it before the look at what LMDB holds."""
        with self._lock:
            self._readers += 1

    def end_reading(self) -> None:
        """The counterpart of `begin_reading`."""
        with self._lock:
            self._readers -= 1
            self._free_withheld()

    def size_bytes(self) -> int:
        """Of the file."""
        return self._end

    def close(self) -> None:
        """Idempotent."""
        with self._lock:
            if self._file >= 0:
                os.close(self._file)
                os.close(self._cached)
                self._file = self._cached = -1

    def _open_file(self) -> None:
        fresh = not self.path.exists()
        self._cached = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            direct = os.O_RDWR | os.O_CLOEXEC | getattr(os, "O_DIRECT", 0)
            self._file = os.open(self.path, direct)
        except OSError:  # a file system that has only a page cache
            self._file = os.dup(self._cached)
        if fresh:
            sync(self.path.parent)

    def _take(self, sizes: Iterable[int]) -> list[Place]:
        """Side by side where there is such a gap, so that they are written at once. Raises OSError."""
        places = [Place(0, size) for size in sizes]
        total = sum(place.blocks for place in places)
        start = self._gap(total)
        if start is not None:
            starts = accumulate([place.blocks for place in places], initial=start)
            return [Place(at, place.size) for at, place in zip(starts, places, strict=False)]
        found: list[Place] = []
        try:
            for place in places:
                if (start := self._gap(place.blocks)) is None:
                    self._grow(total)
                    start = self._gap(place.blocks)
                    assert start is not None
                found.append(Place(start, place.size))
                total -= place.blocks
        except OSError:
            self._give_back(found)
            raise
        return found

    def _gap(self, size: int) -> int | None:
        """Where the first gap of so many bytes begins, which is then taken; None if there is none."""
        for at, (start, room) in enumerate(self._free):
            if room >= size:
                self._free[at : at + 1] = [(start + size, room - size)] if room > size else []
                return start
        return None

    def _give_back(self, places: Iterable[Place]) -> None:
        for place in places:
            self._insert(place.start, place.blocks)

    def _insert(self, start: int, size: int) -> None:
        """A gap, which joins its neighbours."""
        at = bisect(self._free, (start, 0))
        first, last = at, at
        if at < len(self._free) and start + size == self._free[at][0]:
            size += self._free[at][1]
            last += 1
        if at and sum(self._free[at - 1]) == start:
            first -= 1
            start, size = self._free[first][0], self._free[first][1] + size
        self._free[first:last] = [(start, size)]

    def _grow(self, size: int) -> None:
        """By more than `size` while the disk has plenty. A disk that is nearly full is not filled by the attempt."""
        disk = os.fstatvfs(self._cached)
        free = disk.f_bavail * disk.f_frsize
        if free < size:
            raise OSError(errno.ENOSPC, f"No space left for {size} bytes", str(self.path))
        plenty = max(size, min(GROW_BYTES, free // 64 // BLOCK * BLOCK))
        for more in (plenty, size):
            try:
                os.posix_fallocate(self._cached, self._end, more)
            except OSError:
                if more == size:
                    raise
            else:
                self._insert(self._end, more)
                self._end += more
                return

    def _free_withheld(self) -> None:
        if not self._readers:
            self._give_back(self._withheld)
            self._withheld = []

    def _write_run(self, run: list[tuple[Place, Value]]) -> None:
        """Write places that lie side by side. What does not begin or end with a block in memory is copied to one."""
        pieces = [_in_blocks(np.frombuffer(value, np.uint8)) for _, value in run]
        wanted = sum(_whole_blocks(rest.size) for _, rest in pieces)
        if wanted > len(self._staging):
            self._staging = mmap.mmap(-1, wanted)
        parts: list[memoryview] = []
        staging, at = np.frombuffer(self._staging, np.uint8), 0
        for whole, rest in pieces:
            if whole.size:
                parts.append(whole.data)
            if rest.size:
                staging[at : at + rest.size] = rest
                end = at + _whole_blocks(rest.size)
                parts.append(staging[at:end].data)
                at = end
        try:
            written = os.pwritev(self._file, parts, run[0][0].start)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            # A file system that takes larger blocks only, or none past its page cache.
            os.dup2(self._cached, self._file, inheritable=False)
            written = os.pwritev(self._file, parts, run[0][0].start)
        if written != sum(map(len, parts)):
            raise OSError(errno.ENOSPC, f"No space left: it took {written} bytes", str(self.path))


def _runs(values: Iterable[tuple[Place, Value]]) -> Iterator[list[tuple[Place, Value]]]:
    """Those that lie side by side together, up to a bound."""
    run: list[tuple[Place, Value]] = []
    size = 0
    for place, value in values:
        full = size >= _RUN_BYTES or len(run) == _RUN_VALUES
        if run and (full or run[-1][0].start + run[-1][0].blocks != place.start):
            yield run
            run, size = [], 0
        run.append((place, value))
        size += place.blocks
    if run:
        yield run


def _in_blocks(value: Bytes) -> tuple[Bytes, Bytes]:
    """What of a value can be written from where it lies, and the rest."""
    end = 0 if value.ctypes.data % BLOCK else value.size - value.size % BLOCK
    return value[:end], value[end:]
