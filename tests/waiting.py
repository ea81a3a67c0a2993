"""Waiting for what lies on the other side of a socket or in another process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


async def until(condition: Callable[[], bool]) -> None:
    """Wait until it holds; the suite's own timeout is the deadline."""
    while not condition():  # noqa: ASYNC110 - no event on this side
        await asyncio.sleep(0.01)
