"""A patch as bytes: a head, then planes, each compressed by zstd where that makes it smaller.

    head    "mdp1"  kind u8  bytes of a word u8  0 u16  bytes of the bucket u64  changed words u64
    plane   raw bytes u64  stored bytes u64  data        raw and stored are equal: not compressed

all little-endian. What arrives is not trusted: every length is checked before memory is taken.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, TypeAlias

import numpy as np
import zstandard

from meshrl.contract.errors import CorruptError
from meshrl.contract.types import Uint8

Buffer: TypeAlias = bytes | bytearray | memoryview
_MAGIC: Final = b"mdp1"
_HEAD: Final = struct.Struct("<4sBBHQQ")
_PLANE: Final = struct.Struct("<QQ")
_LEVEL: Final = 1
_SAMPLE: Final = 256 << 10


class Kind(IntEnum):
    """What the planes are."""

    WHOLE = 0
    """The bucket itself."""
    GAPS = 1
    """Gaps, codes, escapes, the bytes after the last whole word."""
    BITMAP = 2
    """The same with a bit for each word instead of gaps."""


@dataclass(frozen=True, slots=True)
class Head:
    """The head of a patch."""

    kind: Kind
    word_bytes: int
    nbytes: int
    """Of the bucket."""
    changed: int
    """Words; 0 in a WHOLE."""


def compress(plane: Uint8) -> bytes:
    """One plane, compressed if a sample from its middle gets smaller by a tenth."""
    raw = plane.data
    middle = max(0, (len(raw) - _SAMPLE) // 2)
    sample = raw[middle : middle + _SAMPLE]
    compressor = zstandard.ZstdCompressor(level=_LEVEL)
    stored: Buffer = raw
    if len(compressor.compress(sample)) < 0.9 * len(sample):
        packed = compressor.compress(raw)
        stored = packed if len(packed) < len(raw) else raw
    return b"".join((_PLANE.pack(len(raw), len(stored)), stored))


def join(about: Head, planes: Iterable[bytes]) -> bytes:
    """A patch of compressed planes."""
    start = _HEAD.pack(_MAGIC, about.kind, about.word_bytes, 0, about.nbytes, about.changed)
    return b"".join((start, *planes))


def head(patch: Buffer) -> Head:
    """The head of a patch. Raises CorruptError when these bytes are not a patch."""
    if len(patch) < _HEAD.size:
        raise CorruptError(f"patch: {len(patch)} bytes are not even a head")
    magic, kind, word_bytes, zero, nbytes, changed = _HEAD.unpack_from(patch)
    if magic != _MAGIC or kind > max(Kind) or word_bytes not in (2, 4) or zero:
        raise CorruptError(
            f"patch: starts with {bytes(patch[: _HEAD.size]).hex()}, not with a head"
        )
    if changed > nbytes // word_bytes:
        raise CorruptError(f"patch: {changed} changed words in {nbytes} bytes")
    return Head(Kind(kind), word_bytes, nbytes, changed)


def planes(patch: Buffer, limits: Sequence[int]) -> list[Uint8]:
    """The planes of a patch, of at most `limits` bytes each. Raises CorruptError for anything else."""
    view, position = memoryview(patch), _HEAD.size
    planes_read = []
    for limit in limits:
        if position + _PLANE.size > len(view):
            raise CorruptError("patch: cut short")
        raw, stored = _PLANE.unpack_from(view, position)
        position += _PLANE.size
        if raw > limit or stored > raw or position + stored > len(view):
            raise CorruptError(f"patch: a plane of {raw} bytes stored in {stored} does not belong")
        data = view[position : position + stored]
        planes_read.append(
            np.frombuffer(_decompress(data, raw) if stored < raw else data, dtype=np.uint8)
        )
        position += stored
    if position != len(view):
        raise CorruptError(f"patch: {len(view) - position} bytes too long")
    return planes_read


def _decompress(data: memoryview, raw: int) -> bytes:
    try:
        # zstd allocates the size that the frame states: check it first.
        if zstandard.frame_content_size(data) != raw:
            raise CorruptError(f"patch: a plane does not have the {raw} bytes that it states")
        expanded = zstandard.ZstdDecompressor().decompress(data, allow_extra_data=False)
    except (zstandard.ZstdError, MemoryError) as error:
        raise CorruptError(f"patch: {error}") from error
    if len(expanded) != raw:
        raise CorruptError(f"patch: a plane does not have the {raw} bytes that it states")
    return expanded
