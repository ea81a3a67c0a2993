"""Who may ask the server: as many requests as there are slots, none during an update, nobody after the end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from meshrl.contract.errors import UnavailableError


class ConcurrencyLimit:
    """Of one engine, on one event loop."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.running = 0
        """Requests inside."""
        self.ended: str | None = None
        """Why the engine has stopped."""
        self._closed = False
        self._changed = asyncio.Condition()

    def check(self) -> None:
        """Raises UnavailableError once the engine has stopped."""
        if self.ended is not None:
            raise UnavailableError(f"the engine has stopped: {self.ended}")

    @asynccontextmanager
    async def slot(self, ready: Callable[[], bool]) -> AsyncIterator[None]:
        """A place inside, once there is one and `ready` holds. Raises UnavailableError if the engine stops first."""
        await self.until(lambda: ready() and not self._closed and self.running < self.slots)
        self.running += 1
        try:
            yield
        finally:
            self.running -= 1
            await self.notify()

    @asynccontextmanager
    async def closed(self) -> AsyncIterator[None]:
        """Nobody comes in meanwhile."""
        self._closed = True
        try:
            yield
        finally:
            self._closed = False
            await self.notify()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for `condition`. Raises UnavailableError when the engine stops first."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.ended is not None or condition())
        self.check()

    async def notify(self) -> None:
        """Have those who wait look again."""
        async with self._changed:
            self._changed.notify_all()

    def end(self, reason: str) -> None:
        """The engine stops; the first reason counts."""
        self.ended = self.ended or reason
