"""Messages whose payload protobuf never touches (field 15, `repeated bytes frames`), and pages of messages.

    format      the message as its .proto says: other fields, then 15: frame, 15: frame ...
    sending     one join of the frames as they are, instead of three copies in protobuf
    receiving   one copy of each, instead of a parse and two

Any protobuf implementation reads and writes the same bytes. A frame may be compressed for a slow network: the parser
decompresses it, so the code behind sees no difference, and it still has the checksum of the original.

    column     narrowed, if no bit gets lost     then, if a sample says that it pays
    int32      uint16, where all ids fit          byte planes, zstandard
    uint8      one bit, where all are 0 or 1      zstandard
    others     as they are                        byte planes, zstandard

    compressed = magic, bytes of the frame u32, bytes of its head u32, columns u16, u32 that is 0
                 per column: narrowing u8, planes u8 (0: not compressed), bytes u32, bytes in the frame u32
                 the frame's checksum and head, the columns
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from enum import IntEnum
from typing import Any, Final, Generic, Literal, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import zstandard
from google.protobuf.message import DecodeError, Message

from meshrl.common.sockets import is_loopback
from meshrl.contract.errors import CorruptError
from meshrl.contract.frames import Frame, strip_checksum

Array: TypeAlias = npt.NDArray[Any]
Mode: TypeAlias = Literal["auto", "off", "zstd"]

LEVEL: Final = 1
SAMPLE_BYTES: Final = 16 << 10
"""The part of a column that is compressed first, to decide whether the rest is worth it."""
WORTH: Final = 0.92
"""A column whose sample keeps more than this part of its bytes is not compressed."""
MAX_FRAME_BYTES: Final = 64 << 20
MAX_WINDOW_BYTES: Final = 8 << 20
"""The largest window that a decompressor accepts; zstandard's levels up to 19 need no more."""
TAKES_COMPRESSED: Final = ("meshrl-frames", "zstd")
"""Metadata of a call whose answer may carry compressed frames. Any request may: every queue decompresses them."""
MAGIC: Final = b"mz2\0"
_thread = threading.local()
_HEAD: Final = struct.Struct("<4sIIHI")
_COLUMN: Final = struct.Struct("<BBII")


class Narrowing(IntEnum):
    """How a column was made narrower. The numbers are part of the format."""

    NONE = 0
    BITS = 1
    UINT16 = 2


class FrameCompressor:
    """Compresses and decompresses frames. Not for several threads at once.

    Args:
        level: zstandard's; 3 saves 2 % more bytes than 1 and takes 1.5 times as long.
    """

    def __init__(self, *, level: int = LEVEL) -> None:
        self._zstd = zstandard.ZstdCompressor(
            level=level, write_content_size=False, write_dict_id=False
        )
        self._unzstd = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES)

    def compress(self, frame: bytes) -> bytes | None:
        """The frame in fewer bytes, or None where that does not pay. Raises CorruptError for what is not a frame."""
        columns = [column.values for column in Frame(frame).columns.values()]
        head = memoryview(frame)[: len(frame) - sum(_padded(column.nbytes) for column in columns)]
        entries, parts = [], [head]
        for column in columns:
            narrowing, narrow = narrowed(column)
            planes, data = self._compress_column(narrow)
            entries.append(_COLUMN.pack(narrowing, planes, len(data), column.nbytes))
            parts.append(memoryview(data))
        start = _HEAD.pack(MAGIC, len(frame), len(head), len(columns), 0)
        smaller = b"".join([start, *entries, *parts])
        return smaller if len(smaller) < WORTH * len(frame) else None

    def _compress_column(self, column: Array) -> tuple[int, bytes]:
        """Number of byte planes and compressed bytes; 0 and the bytes as they are where a sample does not shrink."""
        planes = _planes(column)
        sample = _planes(column[: SAMPLE_BYTES // max(1, column.itemsize)])
        compressed_sample = self._zstd.compress(sample)
        if len(compressed_sample) > WORTH * max(1, len(sample)):
            return 0, column.tobytes()
        if len(sample) == len(planes):
            return column.itemsize, compressed_sample
        return column.itemsize, self._zstd.compress(planes)

    def decompress(self, data: bytes, *, limit: int = MAX_FRAME_BYTES) -> bytes:
        """The frame that was compressed, at most `limit` bytes.

        Raises:
            CorruptError: `data` is not a compressed frame, or the frame is larger than `limit`.
        """
        try:
            return self._decompress(memoryview(data), limit)
        except (struct.error, ValueError, zstandard.ZstdError) as error:
            raise CorruptError(
                f"{len(data)} bytes are not a compressed frame of at most {limit}: {error}"
            ) from error

    def _decompress(self, data: memoryview, limit: int) -> bytes:
        magic, size, head, count, zero = _HEAD.unpack_from(data)
        at = _HEAD.size + count * _COLUMN.size
        entries = list(_COLUMN.iter_unpack(data[_HEAD.size : at]))
        described = head + sum(_padded(raw) for *_, raw in entries)
        if magic != MAGIC or zero or described != size or size > limit:
            raise ValueError(f"a frame of {size} bytes, {described} described")
        parts: list[bytes | memoryview] = [data[at : at + head]]
        at += head
        for narrowing, planes, length, raw in entries:
            column = self._decompress_column(
                Narrowing(narrowing), planes, data[at : at + length], raw
            )
            parts += (column, bytes(-raw % 8))
            at += length
        if at != len(data):
            raise ValueError(f"{at} bytes are described")
        return b"".join(parts)

    def _decompress_column(
        self, narrowing: Narrowing, planes: int, data: memoryview, raw: int
    ) -> bytes:
        narrow = _narrow_bytes(narrowing, raw)
        column: bytes | memoryview = data
        if planes:
            # zstandard allocates what the data states of itself, whatever `max_output_size` is.
            stated = zstandard.frame_content_size(data)
            if stated not in (-1, narrow):
                raise ValueError(f"a column states {stated} bytes, {narrow} announced")
            column = self._unzstd.decompress(data, max_output_size=max(1, narrow))
        if len(column) != narrow:
            raise ValueError(f"a column of {len(column)} bytes, {narrow} announced")
        if planes > 1:
            column = np.frombuffer(column, np.uint8).reshape(planes, -1).T.tobytes()
        return _widened(narrowing, column, raw)


def compressed(frame: bytes) -> bytes:
    """The frame in fewer bytes, or as it is where that does not pay or it is not a frame of columns."""
    try:
        return _compressor().compress(frame) or frame
    except CorruptError:
        return frame


def decompressed(frame: bytes, *, limit: int = MAX_FRAME_BYTES) -> bytes:
    """A frame that may have been compressed, at most `limit` bytes. Raises CorruptError.

    The checksum of an uncompressed frame may happen to begin with `MAGIC`: such a frame is known by that checksum.
    """
    if frame[:4] != MAGIC:
        return frame
    with suppress(CorruptError):
        strip_checksum(frame, "frame")
        return frame
    return _compressor().decompress(frame, limit=limit)


def _compressor() -> FrameCompressor:
    """This thread's own."""
    own: FrameCompressor | None = getattr(_thread, "compressor", None)
    if own is None:
        own = _thread.compressor = FrameCompressor()
    return own


def narrowed(column: Array) -> tuple[Narrowing, Array]:
    """The column as a flat array of fewer bytes that loses no bit, or as it is."""
    flat = column.reshape(-1)
    if not flat.size:
        return Narrowing.NONE, flat
    if flat.dtype == np.uint8 and flat.max() <= 1:
        return Narrowing.BITS, np.packbits(flat)
    if flat.dtype == np.int32 and flat.min() >= 0 and flat.max() <= 0xFFFF:
        return Narrowing.UINT16, flat.astype("<u2")
    return Narrowing.NONE, flat


def _widened(narrowing: Narrowing, data: bytes | memoryview, raw: int) -> bytes:
    if narrowing is Narrowing.BITS:
        return np.unpackbits(np.frombuffer(data, np.uint8), count=raw).tobytes()
    if narrowing is Narrowing.UINT16:
        return np.frombuffer(data, "<u2").astype("<u4").tobytes()
    return bytes(data)


def _narrow_bytes(narrowing: Narrowing, raw: int) -> int:
    if narrowing is Narrowing.BITS:
        return -(-raw // 8)
    return raw if narrowing is Narrowing.NONE else raw // 2


def _planes(column: Array) -> bytes:
    """The first byte of every entry, then the second bytes, and so on: similar bytes are adjacent."""
    if column.itemsize == 1:
        return column.tobytes()
    return np.ascontiguousarray(column).view(np.uint8).reshape(-1, column.itemsize).T.tobytes()


def _padded(size: int) -> int:
    return size + -size % 8


def wanted(mode: Mode, address: str) -> bool:
    """Whether a connection to `address` carries compressed frames.

    `auto` compares a core's time with the network's: compression takes about 7 ns a byte and saves three of five
    bytes (benchmarks/compression.py), which pays where a connection gets less than about 0.7 Gbit/s. That is so
    between hosts, where many connections share a link, and never on loopback and unix sockets.
    """
    if mode != "auto":
        return mode == "zstd"
    if address.startswith(("unix:", "unix-abstract:")):
        return False
    host = address.removeprefix("ipv4:").removeprefix("ipv6:").rpartition(":")[0].strip("[]")
    return not is_loopback(host.replace("%5B", "").replace("%5D", ""))


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
        """The serialised pieces, cached when first used or measured; the message must be complete by then."""

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
    """The deserialiser for gRPC, in place of the generated stub's `kind.FromString`. Raises DecodeError.

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
