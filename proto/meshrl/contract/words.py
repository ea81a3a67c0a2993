"""Words of what is said to people."""

from __future__ import annotations


def counted(count: int, one: str, many: str = "") -> str:
    """`1 row`, `1,024 rows`; `many` where it is not `one` with an s."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"
