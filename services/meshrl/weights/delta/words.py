"""Which floating-point words differ, and by how many units in the last place (ULP), as small unsigned codes.

A float's bits, read as sign and magnitude, become an integer in the order of the floats:

    ordered(u) = u            for a clear sign bit        … -1.0 < -0 < +0 < 1.0 …
               = u ^ 0x7fff   for a set one                     -1    0

This is a bijection on all words of the width (NaNs and -0 included) and its own inverse, so that differences modulo
2^width are exact. A step of the optimizer moves most words by one ULP: after zigzag (0, -1, 1, -2 … to 0, 1, 2, 3 …)
nearly all codes are 1 or 2, which an entropy coder turns into little more than a bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

Words: TypeAlias = npt.NDArray[Any]
"""uint16[n] or uint32[n]."""

UNSIGNED: Final[dict[int, np.dtype[Any]]] = {2: np.dtype("<u2"), 4: np.dtype("<u4")}
"""By the bytes of a word."""
_SIGNED: Final[dict[int, np.dtype[Any]]] = {2: np.dtype("<i2"), 4: np.dtype("<i4")}
ESCAPE: Final = 0
"""The code of a difference that takes more than a byte; a changed word never has the difference 0."""
_PIECE: Final = 1 << 20
"""Bytes of either buffer that are compared at once: the fastest of 256 KiB to 128 MiB on a core with 1 MiB of
second-level cache."""


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
"""By the code, for each width."""
