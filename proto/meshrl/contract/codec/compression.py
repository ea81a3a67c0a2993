"""Frames made smaller for a slow network, and back to the same bytes: the seal of a frame holds from end to end.

    column     narrowed, if no bit gets lost     then, if a sample says that it pays
    int32      uint16, where all ids fit          byte planes, zstandard
    uint8      one bit, where all are 0 or 1      zstandard
    float32    float16 or bfloat16, where exact   byte planes, zstandard
    others     as they are                        byte planes, zstandard

    squeezed = magic, bytes of the frame u32, bytes of its head u32, columns u16, dictionary u32 (0: none)
               per column: narrowing u8, planes u8 (0: not compressed), bytes u32, bytes in the frame u32
               the frame's seal and head, the columns

Log-probs that were rounded (contract/precision.py) are exact in 16 bits, and so take half the bytes.
"""

from __future__ import annotations

import ipaddress
import struct
import threading
import zlib
from collections.abc import Iterable
from enum import IntEnum
from typing import Any, Final, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import zstandard

from meshrl.contract.errors import CorruptError
from meshrl.contract.frames import Frame, intact

Array: TypeAlias = npt.NDArray[Any]
Mode: TypeAlias = Literal["auto", "off", "zstd"]

LEVEL: Final = 1
SAMPLE_BYTES: Final = 16 << 10
"""Of a column, to decide by; a smaller column is its own sample."""
WORTH: Final = 0.92
"""Compressed bytes of the sample, over its bytes, from which on a column is left alone."""
DICTIONARY_BYTES: Final = 16 << 10
MAX_FRAME_BYTES: Final = 64 << 20
TAKES_SQUEEZED: Final = ("meshrl-frames", "zstd")
"""Metadata of a call whose answer may carry squeezed frames. Requests may always: every queue can expand them."""
KNOWS_DICTIONARY: Final = "meshrl-dictionary"
"""Metadata of a call whose answer may be squeezed with this dictionary, its number in hexadecimal."""
MAGIC: Final = b"mz2\0"
_here = threading.local()
_HEAD: Final = struct.Struct("<4sIIHI")
_COLUMN: Final = struct.Struct("<BBII")


class Narrowing(IntEnum):
    """How a column was made narrower; the numbers travel."""

    NONE = 0
    BITS = 1
    UINT16 = 2
    FLOAT16 = 3
    BFLOAT16 = 4


class FrameCompressor:
    """Squeezes and expands frames. Not for several threads at once.

    Args:
        level: zstandard's; 3 saves a fiftieth more and takes half as long again.
        dictionary: Of `train_dictionary`, the same on both ends; for many small frames of one kind.
    """

    def __init__(self, *, level: int = LEVEL, dictionary: bytes = b"") -> None:
        known = zstandard.ZstdCompressionDict(dictionary) if dictionary else None
        self.dictionary = dictionary
        self.number = zlib.crc32(dictionary)
        """Of the dictionary; 0 for none."""
        self._zip = zstandard.ZstdCompressor(
            level=level, dict_data=known, write_content_size=False, write_dict_id=False
        )
        self._unzip = {
            0: zstandard.ZstdDecompressor(),
            self.number: zstandard.ZstdDecompressor(dict_data=known),
        }
        """By number of a dictionary."""

    @property
    def known(self) -> tuple[tuple[str, str], ...]:
        """Metadata that tells the other end of the dictionary."""
        return ((KNOWS_DICTIONARY, f"{self.number:08x}"),) if self.number else ()

    def squeeze(self, frame: bytes | memoryview) -> bytes | None:
        """The frame in fewer bytes, or None where that does not pay. Raises CorruptError for what is no frame."""
        columns = [column.values for column in Frame(frame).columns.values()]
        head = memoryview(frame)[: len(frame) - sum(_padded(column.nbytes) for column in columns)]
        entries, parts = [], [head]
        for column in columns:
            narrowing, narrow = narrowed(column)
            planes, data = self.compress(narrow)
            entries.append(_COLUMN.pack(narrowing, planes, len(data), column.nbytes))
            parts.append(memoryview(data))
        start = _HEAD.pack(MAGIC, len(frame), len(head), len(columns), self.number)
        squeezed = b"".join([start, *entries, *parts])
        return squeezed if len(squeezed) < WORTH * len(frame) else None

    def compress(self, column: Array) -> tuple[int, bytes]:
        """Number of byte planes and compressed bytes; 0 and the plain bytes where a sample says it does not pay."""
        planes = _planes(column)
        sample = _planes(column[: SAMPLE_BYTES // max(1, column.itemsize)])
        tried = self._zip.compress(sample)
        if len(tried) > WORTH * max(1, len(sample)):
            return 0, column.tobytes()
        whole = tried if len(sample) == len(planes) else self._zip.compress(planes)
        return column.itemsize, whole

    def expand(self, squeezed: bytes | memoryview, *, limit: int = MAX_FRAME_BYTES) -> bytes:
        """The frame that was squeezed, at most `limit` bytes.

        Raises:
            CorruptError: bytes that no frame was squeezed to, or a larger frame.
        """
        try:
            return self._expand(memoryview(squeezed), limit)
        except (struct.error, ValueError, zstandard.ZstdError) as error:
            raise CorruptError(
                f"{len(squeezed)} bytes are no squeezed frame of at most {limit}: {error}"
            ) from error

    def _expand(self, data: memoryview, limit: int) -> bytes:
        magic, size, head, count, number = _HEAD.unpack_from(data)
        if number not in self._unzip:
            raise ValueError(f"dictionary {number:08x} is not known here")
        at = _HEAD.size + count * _COLUMN.size
        entries = list(_COLUMN.iter_unpack(data[_HEAD.size : at]))
        described = head + sum(_padded(raw) for *_, raw in entries)
        if magic != MAGIC or described != size or size > limit:
            raise ValueError(f"a frame of {size} bytes, {described} described")
        parts: list[bytes | memoryview] = [data[at : at + head]]
        at += head
        for narrowing, planes, length, raw in entries:
            part = data[at : at + length]
            column = self._column(Narrowing(narrowing), planes, part, raw, self._unzip[number])
            parts += (column, bytes(-raw % 8))
            at += length
        if at != len(data):
            raise ValueError(f"{at} bytes are described")
        return b"".join(parts)

    @staticmethod
    def _column(
        narrowing: Narrowing,
        planes: int,
        data: memoryview,
        raw: int,
        unzip: zstandard.ZstdDecompressor,
    ) -> bytes:
        narrow = _narrow_bytes(narrowing, raw)
        plain: bytes | memoryview = data
        if planes:
            plain = unzip.decompress(data, max_output_size=max(1, narrow))
        if len(plain) != narrow:
            raise ValueError(f"a column of {len(plain)} bytes, {narrow} announced")
        if planes > 1:
            plain = np.frombuffer(plain, np.uint8).reshape(planes, -1).T.tobytes()
        return _widened(narrowing, plain, raw)


def squeezed(frame: bytes | memoryview, by: FrameCompressor | None = None) -> bytes | memoryview:
    """The frame in fewer bytes, or as it is where that does not pay or it is no frame of columns."""
    try:
        return (by or _own()).squeeze(frame) or frame
    except CorruptError:
        return frame


def plain(
    frame: bytes | memoryview,
    *,
    limit: int = MAX_FRAME_BYTES,
    by: FrameCompressor | None = None,
) -> bytes | memoryview:
    """A frame that may have been squeezed. Raises CorruptError.

    A plain frame whose seal happens to begin with our magic is told by its seal.
    """
    if frame[:4] != MAGIC or intact(frame):
        return frame
    return (by or _own()).expand(frame, limit=limit)


def _own() -> FrameCompressor:
    """This thread's, without a dictionary."""
    found: FrameCompressor | None = getattr(_here, "compressor", None)
    if found is None:
        found = _here.compressor = FrameCompressor()
    return found


def narrowed(column: Array) -> tuple[Narrowing, Array]:
    """The column in one flat array of fewer bytes from which every bit comes back, or as it is."""
    flat = column.reshape(-1)
    if not flat.size:
        return Narrowing.NONE, flat
    if flat.dtype == np.uint8 and flat.max() <= 1:
        return Narrowing.BITS, np.packbits(flat)
    if flat.dtype == np.int32 and flat.min() >= 0 and flat.max() <= 0xFFFF:
        return Narrowing.UINT16, flat.astype("<u2")
    if flat.dtype == np.float32:
        bits = flat.view("<u4")
        if not (bits & 0xFFFF).any():
            return Narrowing.BFLOAT16, (bits >> 16).astype("<u2")
        with np.errstate(over="ignore"):
            half = flat.astype("<f2")
        if np.array_equal(half.astype("<f4").view("<u4"), bits):
            return Narrowing.FLOAT16, half
    return Narrowing.NONE, flat


def _widened(narrowing: Narrowing, data: bytes | memoryview, raw: int) -> bytes:
    if narrowing is Narrowing.BITS:
        return np.unpackbits(np.frombuffer(data, np.uint8), count=raw).tobytes()
    if narrowing is Narrowing.UINT16:
        return np.frombuffer(data, "<u2").astype("<u4").tobytes()
    if narrowing is Narrowing.FLOAT16:
        return np.frombuffer(data, "<f2").astype("<f4").tobytes()
    if narrowing is Narrowing.BFLOAT16:
        return (np.frombuffer(data, "<u2").astype("<u4") << 16).tobytes()
    return bytes(data)


def _narrow_bytes(narrowing: Narrowing, raw: int) -> int:
    if narrowing is Narrowing.BITS:
        return -(-raw // 8)
    return raw if narrowing is Narrowing.NONE else raw // 2


def _planes(column: Array) -> bytes:
    """First bytes of all entries, then second bytes …: what is alike comes to stand together."""
    if column.itemsize == 1:
        return column.tobytes()
    return np.ascontiguousarray(column).view(np.uint8).reshape(-1, column.itemsize).T.tobytes()


def _padded(size: int) -> int:
    return size + -size % 8


def train_dictionary(frames: Iterable[bytes], size: int = DICTIONARY_BYTES) -> bytes:
    """A dictionary for many small frames of one kind.

    Raises:
        ValueError: too few frames to learn from.
    """
    samples = [
        _planes(narrowed(column.values)[1])
        for frame in frames
        for column in Frame(frame).columns.values()
    ]
    try:
        return zstandard.train_dictionary(size, [s for s in samples if len(s) >= 8]).as_bytes()
    except zstandard.ZstdError as error:
        raise ValueError(f"{len(samples)} columns are too few for a dictionary: {error}") from error


def wanted(mode: Mode, address: str) -> bool:
    """Whether a connection to `address` shall carry squeezed frames.

    `auto` compares a core's time with the wire's: squeezing takes about 7 ns a byte and saves three bytes of five
    (benchmarks/compression.py), which pays where a connection gets less than some 0.7 Gbit/s. Between hosts, where
    many share a link, that is so; on loopback and unix sockets it never is.
    """
    if mode != "auto":
        return mode == "zstd"
    if address.startswith(("unix:", "unix-abstract:")):
        return False
    host = address.removeprefix("ipv4:").removeprefix("ipv6:").rpartition(":")[0].strip("[]")
    try:
        return not ipaddress.ip_address(host.replace("%5B", "").replace("%5D", "")).is_loopback
    except ValueError:
        return host != "localhost"
