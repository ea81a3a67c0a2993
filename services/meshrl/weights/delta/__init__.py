"""The lossless sparse codec of the weight plane; what both ends keep for it is in `patches.py`.

Encodes a bucket against its last version, and applies the patch: exact to the bit, whatever the bits are.

A patch holds where words changed (the gaps between them) and by how many units in the last place
(ULP). Words of 2 bytes are bfloat16 or float16, words of 4 float32; anything else is carried as exactly, only less
well. What differs so much that a patch would be no smaller is stored whole. Pure numpy and zstd; knows nothing of
coordinators, carriers or files.

    head    "mdp1"  kind u8  bytes of a word u8  0 u16  bytes of the bucket u64  changed words u64
    plane   raw bytes u64  stored bytes u64  data        raw and stored are equal: not compressed by zstd

all little-endian. What arrives is not trusted: every length is checked before memory is taken.

A float's bits, read as sign and magnitude, become an integer in the order of the floats:

    ordered(u) = u            for a clear sign bit        … -1.0 < -0 < +0 < 1.0 …
               = u ^ 0x7fff   for a set one                     -1    0

This is a bijection on all words of the width (NaNs and -0 included) and its own inverse, so that differences modulo
2^width are exact. A step of the optimizer moves most words by one ULP: after zigzag (0, -1, 1, -2 … to 0, 1, 2, 3 …)
nearly all codes are 1 or 2, which an entropy coder turns into little more than a bit.

A gap g is g // 255 bytes of 255 and one of g % 255. Changes that fall independently make a byte of 255 as likely
after another as at first, so the bytes keep their entropy however wide the gaps are, and decode by one sum.

Compared with others on the same pairs in benchmarks/delta.py. The idea of sending what changed: arXiv 2602.03839.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
import zstandard

from meshrl.contract.errors import CorruptError
from meshrl.contract.types import Uint8

Buffer: TypeAlias = bytes | bytearray | memoryview
_MAGIC: Final = b"mdp1"
_HEAD: Final = struct.Struct("<4sBBHQQ")
_PLANE: Final = struct.Struct("<QQ")
_LEVEL: Final = 1
_SAMPLE: Final = 256 << 10

_FULL: Final = 255
_GAPS_PIECE: Final = 1 << 15
"""Gaps decoded at once: what they reach, and what is computed of them, stays in a cache."""

Indices = npt.NDArray[np.int64]

Words: TypeAlias = npt.NDArray[Any]
"""uint16[n] or uint32[n]."""

UNSIGNED: Final[dict[int, np.dtype[Any]]] = {2: np.dtype("<u2"), 4: np.dtype("<u4")}
"""Unsigned type by bytes of a word."""
_SIGNED: Final[dict[int, np.dtype[Any]]] = {2: np.dtype("<i2"), 4: np.dtype("<i4")}
ESCAPE: Final = 0
"""The code of a difference that takes more than a byte; a changed word never has the difference 0."""
_PIECE: Final = 1 << 20
"""Bytes of either buffer that are compared at once: the fastest of 256 KiB to 128 MiB on a core with 1 MiB of
second-level cache."""


def encode(base: Uint8, new: Uint8, *, word_bytes: int = 2) -> bytes:
    """The smallest patch that makes `new` of `base`, both uint8[n]."""
    return encode_sparse(base, new, word_bytes=word_bytes) or whole(new, word_bytes=word_bytes)


def encode_sparse(
    base: Uint8, new: Uint8, *, word_bytes: int = 2, max_density: float = 1.0
) -> bytes | None:
    """A patch of what differs; None when that is more than `max_density` of all words, or larger than `new`.

    Args:
        base: uint8[n].
        new: uint8[n].
        word_bytes: 2 or 4.
        max_density: gives up, early, once this share of the words has been found changed.
    """
    if base.shape != new.shape:
        raise ValueError(f"a base of {base.nbytes} bytes for a bucket of {new.nbytes}")
    old_words, new_words = _words(base, word_bytes), _words(new, word_bytes)
    gaps, codes, escapes = [], [], []
    changed, last = 0, -1
    for at, old, fresh in changes(old_words, new_words):
        if not len(at):
            continue
        changed += len(at)
        if changed > max_density * len(new_words):
            return None
        gaps.append(gaps_of(at, last))
        last = int(at[-1])
        small, large = codes_of(old, fresh)
        codes.append(small)
        escapes.append(large)
    about = Head(PatchKind.GAPS, word_bytes, new.nbytes, changed)
    rest = new[len(new_words) * word_bytes :]
    values = _joined(escapes).view(np.uint8)
    patch = join(about, map(compress, (_joined(gaps), _joined(codes), values, rest)))
    return patch if len(patch) < new.nbytes or changed == 0 else None


def whole(new: Uint8, *, word_bytes: int = 2) -> bytes:
    """A patch that needs no base: the bucket itself, compressd if that helps."""
    return join(Head(PatchKind.WHOLE, word_bytes, new.nbytes, 0), [compress(new)])


def apply(base: Uint8 | None, patch: Buffer, into: Uint8 | None = None) -> Uint8:
    """The bucket that a patch makes of `base`, uint8[n].

    Args:
        base: what it was encoded against; a whole bucket needs none.
        patch: what `encode` gave.
        into: uint8[n] to write to; `base` itself to change it in place; None for fresh memory.

    Raises:
        CorruptError: the patch is none, or not one for a bucket and a base of these sizes. `into` is undefined then.
    """
    about = head(patch)
    size = about.nbytes
    for name, given in (("base", base), ("into", into)):
        if given is not None and given.nbytes != size:
            raise CorruptError(f"patch: for a bucket of {size} bytes; {name} has {given.nbytes}")
    if about.kind is PatchKind.WHOLE:
        (content,) = planes(patch, [size])
        if len(content) != size:
            raise CorruptError(f"patch: {len(content)} bytes for a bucket of {size}")
        out = np.empty(size, dtype=np.uint8) if into is None else into
        out[:] = content
        return out
    if base is None:
        raise CorruptError("patch: needs a base, and there is none")
    out = np.empty(size, dtype=np.uint8) if into is None else into
    _apply_sparse(about, patch, base, out)
    return out


def _apply_sparse(about: Head, patch: Buffer, base: Uint8, out: Uint8) -> None:
    width = about.word_bytes
    words, tail = divmod(about.nbytes, width)
    # A gap takes one byte, and one more for each 255 words that it passes.
    limits = [about.changed + words // 255, about.changed, width * about.changed, tail]
    gaps, codes, values, rest = planes(patch, limits)
    if len(codes) != about.changed or len(values) % width or len(rest) != tail:
        raise CorruptError(f"patch: {len(codes)} codes for {about.changed} changed words")
    escapes = values.view(UNSIGNED[width])
    old_words, new_words = _words(base, width), _words(out, width)
    in_place = out.ctypes.data == base.ctypes.data
    copied = taken = escaped = 0
    for at in indices_of(gaps, words):
        piece = codes[taken : taken + len(at)]
        taken += len(at)
        escapes_here = int(np.count_nonzero(piece == ESCAPE))
        large = escapes[escaped : escaped + escapes_here]
        escaped += escapes_here
        if len(piece) != len(at) or len(large) != escapes_here:
            raise CorruptError("patch: more indices than codes, or more escapes than values")
        if not in_place:  # just before it is patched, while it is in the cache
            reach = int(at[-1]) + 1
            new_words[copied:reach] = old_words[copied:reach]
            copied = reach
        new_words[at] = add_codes(new_words[at], piece, large)
    if taken != about.changed or escaped != len(escapes):
        raise CorruptError(f"patch: {taken} indices for {about.changed} changed words")
    if not in_place:
        new_words[copied:] = old_words[copied:]
    out[words * width :] = rest


def _words(buffer: Uint8, width: int) -> Words:
    return buffer[: buffer.nbytes - buffer.nbytes % width].view(UNSIGNED[width])


def _joined(parts: list[Words]) -> Words:
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.uint8)


# The container.


class PatchKind(IntEnum):
    """Content of a patch's planes."""

    WHOLE = 0
    """The bucket itself."""
    GAPS = 1
    """Gaps, codes, escapes, the bytes after the last whole word."""


@dataclass(frozen=True, slots=True)
class Head:
    """The head of a patch."""

    kind: PatchKind
    word_bytes: int
    nbytes: int
    """Length of the bucket."""
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
    if magic != _MAGIC or kind > max(PatchKind) or word_bytes not in (2, 4) or zero:
        raise CorruptError(
            f"patch: starts with {bytes(patch[: _HEAD.size]).hex()}, not with a head"
        )
    if changed > nbytes // word_bytes:
        raise CorruptError(f"patch: {changed} changed words in {nbytes} bytes")
    return Head(PatchKind(kind), word_bytes, nbytes, changed)


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
            raise CorruptError(f"patch: a plane has another size than the stated {raw} bytes")
        expanded = zstandard.ZstdDecompressor().decompress(data, allow_extra_data=False)
    except (zstandard.ZstdError, MemoryError) as error:
        raise CorruptError(f"patch: {error}") from error
    if len(expanded) != raw:
        raise CorruptError(f"patch: a plane has another size than the stated {raw} bytes")
    return expanded


# Where words changed.


def gaps_of(at: Indices, previous: int) -> Uint8:
    """The bytes of indices that come after index `previous` (-1 before the first)."""
    gaps = np.diff(at, prepend=previous)
    gaps -= 1
    wide = np.flatnonzero(gaps >= _FULL)
    if not wide.size:
        return gaps.astype(np.uint8)
    full, rest = np.divmod(gaps[wide], _FULL)
    extra = np.zeros(len(gaps), dtype=np.int64)
    extra[wide] = full
    gaps[wide] = rest
    places = np.cumsum(extra)
    places += np.arange(len(gaps))
    out = np.full(places[-1] + 1, _FULL, dtype=np.uint8)
    out[places] = gaps
    return out


def indices_of(gaps: Uint8, words: int) -> Iterator[Indices]:
    """The indices again, in order, piece by piece. Raises CorruptError for one of `words` or more."""
    base = 0
    for start in range(0, len(gaps), _GAPS_PIECE):
        piece = gaps[start : start + _GAPS_PIECE]
        at = np.cumsum(piece, dtype=np.int64)
        at += base
        base = int(at[-1])
        at = at[piece != _FULL]
        at += np.arange(len(at))
        base += len(at)
        if len(at):
            if at[-1] >= words:
                raise CorruptError(f"patch: word {at[-1]} of a bucket of {words} words")
            yield at


# By how much.


def changes(old: Words, new: Words) -> Iterator[tuple[npt.NDArray[np.int64], Words, Words]]:
    """Yields (indices int64[k], old words[k], new words[k]) of the words that differ, in order, piece by piece.

    Compares eight bytes at a time first, then word by word where something was found. In pieces that fit a core's
    cache, so that memory is read once.
    """
    width = old.dtype.itemsize
    piece = _PIECE // width
    per_block = 8 // width
    aligned = len(old) - len(old) % per_block
    scratch = np.empty(_PIECE // 8, dtype=np.bool_)
    for start in range(0, aligned, piece):
        end = min(start + piece, aligned)
        blocks = old[start:end].view("<u8"), new[start:end].view("<u8")
        differ = np.not_equal(*blocks, out=scratch[: len(blocks[0])])
        found = np.flatnonzero(differ)
        words = [each[found].view(UNSIGNED[width]) for each in blocks]
        within = np.flatnonzero(words[0] != words[1])
        at = found[within // per_block] * per_block + within % per_block + start
        yield at, words[0][within], words[1][within]
    rest: Any = np.flatnonzero(old[aligned:] != new[aligned:]) + aligned
    yield rest, old[rest], new[rest]


def ordered(words: Words) -> Words:
    """Signed integers in the order of the floats; `unordered` is the inverse, on the same bits."""
    width = words.dtype.itemsize
    signed = words.view(_SIGNED[width])
    flip = signed >> (8 * width - 1)
    flip &= (1 << (8 * width - 1)) - 1
    flip ^= signed
    return flip


def unordered(ranks: Words) -> Words:
    """The words of `ordered` ranks."""
    return ordered(ranks).view(UNSIGNED[ranks.dtype.itemsize])


def codes_of(old: Words, new: Words) -> tuple[Words, Words]:
    """Differences as (uint8 codes[n], unsigned escapes): a code of ESCAPE stands for the next escape.

    Args:
        old: words.
        new: of the same shape; each differs from its old one.
    """
    width = old.dtype.itemsize
    difference = ordered(new) - ordered(old)
    zigzag = (difference << 1) ^ (difference >> (8 * width - 1))
    wide = zigzag.view(UNSIGNED[width])
    codes = wide.astype(np.uint8)
    large = np.flatnonzero(wide > 255)
    codes[large] = ESCAPE
    return codes, wide[large]


def add_codes(old: Words, codes: Words, escapes: Words) -> Words:
    """The new words; the inverse of `codes_of`. As many escapes as codes of ESCAPE."""
    width = old.dtype.itemsize
    difference = _DIFFERENCE[width][codes]
    if escapes.size:
        wide = escapes.view(UNSIGNED[width])
        difference[codes == ESCAPE] = ((wide >> 1) ^ -(wide & 1)).view(_SIGNED[width])
    difference += ordered(old)
    return unordered(difference)


def _differences(width: int) -> Words:
    zigzag = np.arange(256, dtype=_SIGNED[width])
    return (zigzag >> 1) ^ -(zigzag & 1)


_DIFFERENCE: Final = {width: _differences(width) for width in UNSIGNED}
"""Difference for each code, by bytes of a word."""


__all__ = ["Head", "apply", "encode", "encode_sparse", "head", "whole"]
