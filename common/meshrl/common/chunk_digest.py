"""A digest of bytes that a GPU makes as well as a processor: of weights that lie in a device's memory.

Made of chunks of 32,768 64-bit words w: sum of (w ^ (w >> 32)) * K[i] modulo 2^64, K[i] odd and fixed. Any single
word that differs changes it, and so do two that changed places. It finds errors; it is no signature.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np
import numpy.typing as npt

from meshrl.contract.types import Uint8

CHUNK_WORDS = 32768
_PART_BYTES = 64 * CHUNK_WORDS * 8
"""Bytes that one thread digests at once: 16 MiB."""
_MOST_THREADS = 8


def digest(data: Uint8) -> str:
    """16 hexadecimal digits, those that `meshrl_staged.digest`, which runs in a server, makes of the same bytes."""
    parts = [data[at : at + _PART_BYTES] for at in range(0, len(data), _PART_BYTES)]
    if len(parts) <= 1:
        return of_chunks(len(data), map(_chunks, parts))
    with ThreadPoolExecutor(min(_MOST_THREADS, os.cpu_count() or 1), "chunk-digest") as threads:
        return of_chunks(len(data), threads.map(_chunks, parts))


def of_chunks(nbytes: int, sums: Iterable[bytes]) -> str:
    """The digest of `nbytes` bytes, from the sums of their chunks, little-endian."""
    found = hashlib.blake2b(nbytes.to_bytes(8, "little"), digest_size=8)
    for each in sums:
        found.update(each)
    return found.hexdigest()


def _chunks(data: Uint8) -> bytes:
    """The sums of a part that begins with a chunk."""
    sums = bytearray()
    mixed, shift = np.empty(CHUNK_WORDS, dtype=np.uint64), np.uint64(32)
    for at in range(0, len(data), CHUNK_WORDS * 8):  # in place, in the processor's cache
        part = data[at : at + CHUNK_WORDS * 8]
        rest = CHUNK_WORDS * 8 - len(part)
        words = (np.pad(part, (0, rest)) if rest else part).view(np.uint64)
        np.right_shift(words, shift, out=mixed)
        np.bitwise_xor(mixed, words, out=mixed)
        np.multiply(mixed, factors(), out=mixed)
        sums += mixed.sum(dtype=np.uint64).tobytes()
    return bytes(sums)


@cache
def factors() -> npt.NDArray[np.uint64]:
    """uint64[CHUNK_WORDS], K: the odd neighbours of SplitMix64's sequence (Steele et al., 2014)."""
    z = np.arange(1, CHUNK_WORDS + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (z ^ (z >> np.uint64(31))) | np.uint64(1)
