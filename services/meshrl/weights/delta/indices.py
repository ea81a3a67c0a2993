"""Increasing indices as bytes: gaps (the unchanged words before each changed one), or a bitmap.

A gap g is g // 255 bytes of 255 and one of g % 255. Changes that fall independently make a byte of 255 as likely
after another as at first, so the bytes keep their entropy however wide the gaps are, and decode by one sum.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
import numpy.typing as npt

from meshrl.contract.errors import CorruptError
from meshrl.contract.types import Uint8

_FULL: Final = 255
_PIECE: Final = 1 << 15
"""Gaps decoded at once: what they reach, and what is computed of them, stays in a cache."""

_BITMAP_PIECE: Final = 1 << 14
"""Bytes of a bitmap that are unpacked at once."""

Indices = npt.NDArray[np.int64]


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
    for start in range(0, len(gaps), _PIECE):
        piece = gaps[start : start + _PIECE]
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


def bitmap_of(gaps: Uint8, words: int) -> Uint8:
    """The same indices as bits of `words` words, lowest bit first."""
    bits = np.zeros(words, dtype=np.bool_)
    for at in indices_of(gaps, words):
        bits[at] = True
    return np.packbits(bits, bitorder="little")


def indices_in_bitmap(bitmap: Uint8, words: int) -> Iterator[Indices]:
    """The indices of the set bits, piece by piece. Raises CorruptError for one of `words` or more."""
    for start in range(0, len(bitmap), _BITMAP_PIECE):
        bits = np.unpackbits(bitmap[start : start + _BITMAP_PIECE], bitorder="little")
        at = np.flatnonzero(bits.view(np.bool_)) + 8 * start
        if len(at):
            if at[-1] >= words:
                raise CorruptError(f"patch: word {at[-1]} of a bucket of {words} words")
            yield at
