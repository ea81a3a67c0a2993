"""Waiting for whichever comes first, leaving nothing running behind."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable


async def first_of(*waits: Awaitable[object], timeout_s: float | None = None) -> None:
    """Return when one of `waits` is done or `timeout_s` has passed; the others are cancelled.

    Hand over `asyncio.shield(task)` for a task that must live on. Raises what a wait that is done raised.
    """
    futures = [asyncio.ensure_future(wait) for wait in waits]
    try:
        done, _ = await asyncio.wait(
            futures, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
        )
        for future in done:
            future.result()
    finally:
        for future in futures:
            future.cancel()
        await asyncio.gather(*futures, return_exceptions=True)
