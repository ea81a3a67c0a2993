"""Messages whose payload protobuf never touches (field 15, `repeated bytes frames`), and pages of messages.

    format      the message as its .proto says: other fields, then 15: frame, 15: frame ...
    sending     one join of the frames as they are, instead of three copies in protobuf
    receiving   one copy of each, instead of a parse and two

Any protobuf implementation reads and writes the same bytes. A frame may be compressed (compression.py): the parser
decompresses it, so the code behind sees no difference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, Generic, TypeVar

from google.protobuf.message import DecodeError, Message

from meshrl.contract.codec.compression import MAGIC, MAX_FRAME_BYTES, compressed, decompressed
from meshrl.contract.errors import CorruptError

PAGE_BYTES: Final = 1 << 20
"""One mebibyte, because protobuf's copies cost more than larger messages save."""

Item = TypeVar("Item")
M = TypeVar("M", bound=Message)


def pages(size_of: Callable[[Item], int], items: Iterable[Item]) -> Iterator[list[Item]]:
    """Items in order, together at most PAGE_BYTES unless one alone is larger. At least one page."""
    page: list[Item] = []
    room = PAGE_BYTES
    for item in items:
        size = size_of(item)
        if page and size > room:
            yield page
            page, room = [], PAGE_BYTES
        page.append(item)
        room -= size
    yield page


FRAMES: Final = 15
"""The number of the field `frames` in every message that carries bulk."""
_TAG: Final = FRAMES << 3 | 2
_FIXED: Final = {1: 8, 5: 4}
"""Bytes of a value, by wire type."""

MAX_DECOMPRESSED_BYTES: Final = MAX_FRAME_BYTES + PAGE_BYTES
"""The largest message with its frames decompressed: one frame of the largest size, and a page."""


class Bulk(Generic[M]):
    """A message without its frames, and the frames."""

    __slots__ = ("_parts", "_size", "frames", "message")

    def __init__(self, message: M, frames: Sequence[bytes], size: int | None = None) -> None:
        self.message = message
        self.frames = frames
        self._size = size
        self._parts: list[bytes] = []
        """What is sent, from the first time that somebody asks for it or its size: then the message is complete."""

    def ByteSize(self) -> int:
        """Bytes of the serialised message, as protobuf's method of that name says."""
        if self._size is None:
            self._size = sum(map(len, self._pieces()))
        return self._size

    def compressed(self) -> Bulk[M]:
        """The same message with each frame in fewer bytes, where that pays."""
        return Bulk(self.message, [compressed(frame) for frame in self.frames])

    def SerializeToString(self) -> bytes:
        """The bytes that protobuf would write."""
        return b"".join(self._pieces())

    def _pieces(self) -> Sequence[bytes]:
        """The bytes that protobuf would write, no frame copied.

        Protobuf serialises a message to tell its size, so that is done once for both.
        """
        if not self._parts:
            self._parts = [self.message.SerializeToString()]
            for frame in self.frames:
                self._parts += (bytes((_TAG,)) + _varint(len(frame)), frame)
        return self._parts


def parser(kind: type[M]) -> Callable[[bytes], Bulk[M]]:
    """For gRPC: what a generated stub would be given `kind.FromString` for. Raises DecodeError.

    Its counterpart for sending is `Bulk.SerializeToString`.
    """

    def parse(data: bytes) -> Bulk[M]:
        rest, frames = _apart(data)
        size = len(data)
        for number, frame in enumerate(frames):
            if frame[:4] == MAGIC:
                limit = MAX_DECOMPRESSED_BYTES + len(frame) - size
                try:
                    frames[number] = decompressed(frame, limit=limit)
                except CorruptError as error:
                    raise DecodeError(str(error)) from error
                size += len(frames[number]) - len(frame)
        return Bulk(kind.FromString(rest), frames, size)

    return parse


def _varint(value: int) -> bytes:
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while shift < 64:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    raise DecodeError("a varint of more than ten bytes")


def _apart(data: bytes) -> tuple[bytes, list[bytes]]:
    """The message without its frames, and the frames.

    Fields that protobuf does not take it refuses when it parses the rest.
    """
    rest: list[bytes] = []
    frames: list[bytes] = []
    at = kept = 0
    try:
        while at < len(data):
            start = at
            tag, at = _read_varint(data, at)
            if tag == _TAG:
                size, at = _read_varint(data, at)
                if start > kept:
                    rest.append(data[kept:start])
                frames.append(data[at : at + size])
                at = kept = at + size
            elif tag & 7 == 2:
                size, at = _read_varint(data, at)
                at += size
            elif tag & 7 == 0:
                _, at = _read_varint(data, at)
            elif tag & 7 in _FIXED:
                at += _FIXED[tag & 7]
            else:
                raise DecodeError(f"a field of wire type {tag & 7}")
            if at > len(data):
                raise DecodeError(f"a field ends {at - len(data)} bytes after the message")
    except IndexError:
        raise DecodeError("the message ends in the middle of a field") from None
    rest.append(data[kept:])
    return b"".join(rest), frames
