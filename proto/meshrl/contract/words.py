"""Words of what is said to people, and text that others wrote."""

from __future__ import annotations


def counted(count: int, one: str, many: str = "") -> str:
    """`1 row`, `1,024 rows`; `many` where it is not `one` with an s."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def whole(text: str) -> str:
    """`text` with U+FFFD for each half of a surrogate pair, which is no character: it has no UTF-8 and no tokens."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
