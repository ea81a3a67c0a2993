"""Encode a bucket against its last version, and apply the patch: exact to the bit, whatever the bits are.

A patch holds where words changed (gaps, or a bitmap when that is smaller) and by how many ULP. Words of 2 bytes are
bfloat16 or float16, words of 4 float32; anything else is carried as exactly, only less well. What differs so much
that a patch would be no smaller is stored whole.

Compared with others on the same pairs in benchmarks/delta.py. The idea of sending what changed: arXiv 2602.03839.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from meshrl.contract.errors import CorruptError
from meshrl.contract.types import Uint8
from meshrl.weights.delta.indices import bitmap_of, gaps_of, indices_in_bitmap, indices_of
from meshrl.weights.delta.patch import Buffer, Head, Kind, compress, head, join, planes
from meshrl.weights.delta.words import ESCAPE, UNSIGNED, Words, add_codes, changes, codes_of

_BITMAP_FROM: Final = 1 / 16
"""Changed words; below, gaps are always smaller."""


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
    where = _joined(gaps)
    kind, index = Kind.GAPS, compress(where)
    if changed >= _BITMAP_FROM * len(new_words):
        bitmap = compress(bitmap_of(where, len(new_words)))
        if len(bitmap) < len(index):
            kind, index = Kind.BITMAP, bitmap
    about = Head(kind, word_bytes, new.nbytes, changed)
    rest = new[len(new_words) * word_bytes :]
    values = _joined(escapes).view(np.uint8)
    patch = join(about, (index, *map(compress, (_joined(codes), values, rest))))
    return patch if len(patch) < new.nbytes or changed == 0 else None


def whole(new: Uint8, *, word_bytes: int = 2) -> bytes:
    """A patch that needs no base: the bucket itself, compressd if that helps."""
    return join(Head(Kind.WHOLE, word_bytes, new.nbytes, 0), [compress(new)])


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
    if about.kind is Kind.WHOLE:
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
    index_bytes = -(-words // 8) if about.kind is Kind.BITMAP else about.changed + words // 255
    limits = [index_bytes, about.changed, width * about.changed, tail]
    index, codes, values, rest = planes(patch, limits)
    if len(codes) != about.changed or len(values) % width or len(rest) != tail:
        raise CorruptError(f"patch: {len(codes)} codes for {about.changed} changed words")
    escapes = values.view(UNSIGNED[width])
    old_words, new_words = _words(base, width), _words(out, width)
    in_place = out.ctypes.data == base.ctypes.data
    indices = (
        indices_in_bitmap(index, words) if about.kind is Kind.BITMAP else indices_of(index, words)
    )
    copied = taken = escaped = 0
    for at in indices:
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
