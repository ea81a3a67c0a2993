"""Columns of many rows as a stream: headers and payload bytes apart, at most CHUNK_BYTES of them a message.

    rows      r0            r1                 r2
    columns   [tokens|mask] [tokens   |mask]   [tokens …]        each padded to a multiple of 8 bytes
    messages  {r0 r1, payload........} {r2, payload....}          an array is cut only if it is larger than a message

One mebibyte, because protobuf's copies cost more than larger messages save.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, TypeVar

import numpy.typing as npt
from google.protobuf.message import Message

from meshrl.contract.codec.arrays import byte_count, byte_view, dtype_of, little_endian, view
from meshrl.contract.codec.checks import malformed
from meshrl.contract.codec.nouns import decode_uid, encode_uid
from meshrl.contract.nouns import Columns, Uid
from meshrl.v1 import trajectory_pb2 as pb

CHUNK_BYTES: Final = 1 << 20
ALIGNMENT: Final = 8
"""Bytes: so that a view of any dtype is aligned, in every message."""
_ZEROS: Final = bytes(ALIGNMENT)

Row = TypeVar("Row", bound=Message)


def encode_row(uid: Uid, columns: Columns) -> tuple[pb.RowHeader, list[memoryview]]:
    """The header of a row, and the bytes of its columns uncopied."""
    header = pb.RowHeader(uid=encode_uid(uid))
    views = []
    for name, column in columns.items():
        array = little_endian(column)
        header.columns.add(name=name, dtype=array.dtype.name, shape=array.shape)
        views.append(byte_view(array))
    return header, views


def chunks(rows: Iterable[tuple[Row, Sequence[memoryview]]]) -> Iterator[tuple[list[Row], bytes]]:
    """Cut rows into what one message carries: headers, and payload bytes. At least one chunk."""
    headers: list[Row] = []
    parts: list[memoryview | bytes] = []
    room = CHUNK_BYTES
    for header, arrays in rows:
        size = header.ByteSize()
        if headers and size > room:
            yield headers, b"".join(parts)
            headers, parts, room = [], [], CHUNK_BYTES
        headers.append(header)
        # Rounded to the alignment, so that an array that is cut is cut at a multiple of it.
        room = max(0, room - size - (-size % ALIGNMENT))
        for array in arrays:
            rest = array
            while len(rest) > room:
                whole = 0 if len(array) <= CHUNK_BYTES else room
                parts.append(rest[:whole])
                rest = rest[whole:]
                yield headers, b"".join(parts)
                headers, parts, room = [], [], CHUNK_BYTES
            padding = -len(rest) % ALIGNMENT
            parts += (rest, _ZEROS[:padding])
            room = max(0, room - len(rest) - padding)
    yield headers, b"".join(parts)


class Payload:
    """The bytes of a stream, read in order. An array that lies in one message is not copied."""

    def __init__(self, pieces: Iterable[bytes]) -> None:
        self._pieces = [memoryview(piece) for piece in pieces if piece]
        self._pieces.reverse()

    def take(self, size: int) -> bytes | memoryview:
        """The next `size` bytes, and past their padding. Raises ValueError when there are fewer."""
        taken = self._next(size)
        self._next(-size % ALIGNMENT)
        return taken

    def finish(self) -> None:
        """Raises ValueError when bytes are left."""
        left = sum(map(len, self._pieces))
        if left:
            malformed(f"{left} bytes of payload belong to no column")

    def _next(self, size: int) -> bytes | memoryview:
        parts: list[memoryview] = []
        missing = size
        while missing:
            if not self._pieces:
                malformed(f"the payload ends {missing} bytes early")
            piece = self._pieces.pop()
            parts.append(piece[:missing])
            if len(piece) > missing:
                self._pieces.append(piece[missing:])
            missing -= len(parts[-1])
        return parts[0] if len(parts) == 1 else b"".join(parts)


def decode_row(header: pb.RowHeader, payload: Payload) -> tuple[Uid, Columns]:
    """A row and read-only views of its columns. Raises ValueError or UserError."""
    uid = decode_uid(header.uid)
    columns: dict[str, npt.NDArray[Any]] = {}
    for column in header.columns:
        if not column.name or column.name in columns:
            malformed(f"row {uid}: column {column.name!r} is nameless or there twice")
        dtype = dtype_of(column.dtype)
        data = payload.take(byte_count(dtype, column.shape))
        columns[column.name] = view(data, dtype, column.shape)
    return uid, columns
