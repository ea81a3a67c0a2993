"""Many small messages in a few larger ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final, TypeVar

from google.protobuf.message import Message

PAGE_BYTES: Final = 1 << 20
"""One mebibyte, because protobuf's copies cost more than larger messages save."""

Item = TypeVar("Item", bound=Message)


def pages(items: Iterable[Item]) -> Iterator[list[Item]]:
    """Items in order, together at most PAGE_BYTES unless one alone is larger. At least one page."""
    page: list[Item] = []
    room = PAGE_BYTES
    for item in items:
        size = item.ByteSize()
        if page and size > room:
            yield page
            page, room = [], PAGE_BYTES
        page.append(item)
        room -= size
    yield page
