"""Sets of rows of a group as integers: bit i is the row at index i."""

from __future__ import annotations

from functools import lru_cache


@lru_cache(maxsize=4096)
def bits(mask: int) -> tuple[int, ...]:
    """The indices in `mask`, lowest first. Cached, since nearly all masks are of complete groups."""
    indices = []
    while mask:
        low = mask & -mask
        indices.append(low.bit_length() - 1)
        mask ^= low
    return tuple(indices)


@lru_cache(maxsize=4096)
def hexed(mask: int) -> str:
    """`mask` as it is stored. Cached for the same reason."""
    return f"{mask:x}"


def lowest(mask: int, count: int) -> int:
    """The `count` lowest bits of `mask`; all of them if it has fewer."""
    if mask.bit_count() <= count:
        return mask
    result = 0
    for _ in range(count):
        low = mask & -mask
        result |= low
        mask ^= low
    return result
