"""Cuts what is too large for one message into pages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final, TypeVar

from google.protobuf.message import Message

PAGE_BYTES: Final = 1 << 20
"""One mebibyte, because protobuf's copies cost more than larger messages save."""

M = TypeVar("M", bound=Message)
Item = TypeVar("Item")


def pages(messages: Iterable[M]) -> Iterator[list[M]]:
    """Messages in order, together at most PAGE_BYTES unless one alone is larger. At least one page."""
    return pages_by(lambda message: message.ByteSize(), messages)


def pages_by(size_of: Callable[[Item], int], items: Iterable[Item]) -> Iterator[list[Item]]:
    """As `pages`, for what has most of its bytes beside a message."""
    page: list[Item] = []
    room = PAGE_BYTES
    for item in items:
        size = size_of(item)
        if page and size > room:
            yield page
            page, room = [], PAGE_BYTES
        page.append(item)
        room -= size
    yield page
