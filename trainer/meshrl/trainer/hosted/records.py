"""The journal of one model, its requests and answers: checksummed frames in files.

    journal-000000000000   frame frame frame …          requests from that number on, and answers as they come
    frame   magic, xxh3_64 of the rest, own offset u64, size u64, entries (kind u8, number u64, size u64, bytes)

A frame holds all that waited while the one before it was synced. So at most the last one can be torn: it is cut off,
it was never acknowledged. A bad frame with a good one behind it is damage.
"""

from __future__ import annotations

import asyncio
import os
import struct
from collections.abc import Sequence
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple

from meshrl.common.files import FULL
from meshrl.contract.errors import CapacityError, CorruptError, InfraError, NotFoundError
from meshrl.contract.frames import strip_checksum, with_checksum
from meshrl.trainer.hosted.storage import Disk

_MAGIC = b"mrljrnl1"
_HEAD = struct.Struct("<QQ")
_FRAME = len(_MAGIC) + 8 + _HEAD.size
_ENTRY = struct.Struct("<BQQ")


class EntryKind(IntEnum):
    """Kinds of entries of a journal, each of a number."""

    REQUEST = 1
    ANSWER = 2
    REFUSAL = 3
    """The answer of a request that was never begun, behind the digest of that."""


class _Place(NamedTuple):
    path: Path
    at: int
    size: int


class Journal:
    """The journal of one model."""

    def __init__(self, folder: Path, disk: Disk) -> None:
        """Read what is there; a torn end is cut off.

        Raises:
            CorruptError: a frame is damaged, and others are behind it.
        """
        self._folder, self._disk = folder, disk
        self._places: dict[tuple[EntryKind, int], _Place] = {}
        self._sizes: dict[Path, int] = {}
        self._waiting: list[
            tuple[Sequence[tuple[EntryKind, int, bytes]], asyncio.Future[None]]
        ] = []
        self._flush: asyncio.Task[None] | None = None
        paths = sorted(folder.glob("journal-*"))
        for path in paths:
            self._sizes[path] = self._read_file(path, last=path == paths[-1])
        self._path = next(reversed(self._sizes), folder / _file_name(0))

    @property
    def size(self) -> int:
        """Bytes since the last `rotate`."""
        return self._sizes.get(self._path, 0)

    def has(self, kind: EntryKind, number: int) -> bool:
        """Whether it is durable."""
        return (kind, number) in self._places

    def numbers(self, kind: EntryKind) -> list[int]:
        """Numbers of the entries of a kind."""
        return sorted(number for each, number in self._places if each == kind)

    def length(self, number: int) -> int:
        """Bytes of a request; 0 where there is none."""
        place = self._places.get((EntryKind.REQUEST, number))
        return 0 if place is None else place.size

    def read(self, kind: EntryKind, number: int) -> bytes:
        """The bytes that were appended. Raises NotFoundError, CorruptError."""
        place = self._places.get((kind, number))
        if place is None:
            raise NotFoundError(f"the journal in {self._folder} has nothing of request {number}")
        with place.path.open("rb") as file:
            data = os.pread(file.fileno(), place.size, place.at)
        if len(data) < place.size:
            raise CorruptError(f"{place.path} is shorter than it was")
        return data

    async def append(self, *entries: tuple[EntryKind, int, bytes]) -> None:
        """Durable on return, together with what others append meanwhile.

        Raises:
            CapacityError: the disk is full; nothing of them is kept.
            InfraError: it fails otherwise.
        """
        done = asyncio.get_running_loop().create_future()
        self._waiting.append((entries, done))
        if self._flush is None or self._flush.done():
            self._flush = asyncio.create_task(self._flush_all())
        await done

    async def _flush_all(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting, []
            path, problem = self._path, None
            at = self._sizes.get(path, 0)
            data, places = _frame(path, at, [each for entries, _ in batch for each in entries])
            try:
                await asyncio.to_thread(self._disk.append, path, at, data)
            except Exception as error:
                full = isinstance(error, OSError) and error.errno in FULL
                problem = (CapacityError if full else InfraError)(f"{path}: {error}")
            else:
                self._sizes[path] = at + len(data)
                self._places |= places
            for _, done in batch:
                if done.done():  # the waiting client has gone
                    continue
                done.set_exception(problem) if problem else done.set_result(None)

    def rotate(self, first: int) -> None:
        """Continue in a new file, whose requests are mostly those from `first` on."""
        if self.size:
            self._path = self._folder / _file_name(first)

    def trim(self, first: int, most: int) -> None:
        """Remove the oldest files, while there are more than `most` bytes, that have no request from `first` on."""
        for path in list(self._sizes)[:-1]:
            here = [key for key, place in self._places.items() if place.path == path]
            needed = any(kind == EntryKind.REQUEST and number >= first for kind, number in here)
            if needed or sum(self._sizes.values()) <= most:
                return
            self._disk.remove(path)
            del self._sizes[path]
            for key in here:
                del self._places[key]

    def _read_file(self, path: Path, *, last: bool) -> int:
        """Its length without a torn end."""
        data, at = path.read_bytes(), 0
        while at < len(data):
            body = _body(data, at)
            if body is None:
                if not last or _is_inside(data, at):
                    raise CorruptError(
                        f"{path} is damaged at byte {at}, and what is behind it is sound: put the file back from a"
                        " copy, or remove the model's folder to continue without the model"
                    )
                self._disk.truncate(path, at)
                return at
            end = at + _FRAME + len(body)
            at += _FRAME
            while at < end:
                kind, number, size = _ENTRY.unpack_from(data, at)
                at += _ENTRY.size
                self._places[EntryKind(kind), number] = _Place(path, at, size)
                at += size
        return at


def _file_name(first: int) -> str:
    return f"journal-{first:012d}"


def _frame(
    path: Path, at: int, entries: Sequence[tuple[EntryKind, int, bytes]]
) -> tuple[bytes, dict[tuple[EntryKind, int], _Place]]:
    """A frame's bytes, and where its entries will be."""
    places, parts = {}, []
    begin = at + _FRAME
    for kind, number, data in entries:
        begin += _ENTRY.size
        places[kind, number] = _Place(path, begin, len(data))
        parts += [_ENTRY.pack(kind, number, len(data)), data]
        begin += len(data)
    head = _HEAD.pack(at, begin - at - _FRAME)
    return _MAGIC + with_checksum(head, *parts), places


def _is_inside(data: bytes, at: int) -> bool:
    """Whether there is a sound frame behind a place."""
    while (at := data.find(_MAGIC, at + 1)) >= 0:
        if _body(data, at) is not None:
            return True
    return False


def _body(data: bytes, at: int) -> memoryview | None:
    """The entries of the frame at a place; None if there is no sound frame."""
    if data[at : at + len(_MAGIC)] != _MAGIC or at + _FRAME > len(data):
        return None
    own, size = _HEAD.unpack_from(data, at + _FRAME - _HEAD.size)
    end = at + _FRAME + size
    if own != at or end > len(data):
        return None
    try:
        return strip_checksum(data[at + len(_MAGIC) : end], "")[_HEAD.size :]
    except CorruptError:
        return None
