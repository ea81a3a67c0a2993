"""How many requests an engine over a server may run: limits by slots, KV cache and updates; the rate of tokens.

    capacity = running + (cache - tokens reserved for them) / tokens expected of one more

A request is expected to become as long as the longest of those that ended last, and never longer than its own limit;
before any has ended, as long as the largest limit. A request that has already grown longer counts with its own
length.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from meshrl.contract.errors import EngineGoneError

RATE_SPAN_S = 1.0
"""Seconds over which the rate of tokens is measured."""


class ConcurrencyLimit:
    """Admits as many requests as there are slots, none while closed, none after the end. One event loop."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.running = 0
        """Admitted requests that have not ended."""
        self.ended: str | None = None
        """Why the engine has stopped."""
        self._closed = False
        self._changed = asyncio.Condition()

    def check(self) -> None:
        """Raises EngineGoneError once the engine has stopped."""
        if self.ended is not None:
            raise EngineGoneError(f"the engine has stopped: {self.ended}")

    @asynccontextmanager
    async def slot(self, ready: Callable[[], bool]) -> AsyncIterator[None]:
        """Take a slot once one is free and `ready` holds. Raises EngineGoneError if the engine stops first."""
        await self.until(lambda: ready() and not self._closed and self.running < self.slots)
        self.running += 1
        try:
            yield
        finally:
            self.running -= 1
            await self.notify()

    @asynccontextmanager
    async def closed(self) -> AsyncIterator[None]:
        """Admit no request during the context."""
        self._closed = True
        try:
            yield
        finally:
            self._closed = False
            await self.notify()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for `condition`. Raises EngineGoneError when the engine stops first."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.ended is not None or condition())
        self.check()

    async def notify(self) -> None:
        """Make waiting requests evaluate their condition again."""
        async with self._changed:
            self._changed.notify_all()

    def end(self, reason: str) -> None:
        """Stop the engine; the first reason is recorded."""
        self.ended = self.ended or reason


@dataclass(slots=True, eq=False)
class RunningRequest:
    """One request; both lengths in tokens, prompt included."""

    length: int
    """Now."""
    longest: int
    """Its limit."""


class CacheCapacity:
    """Estimates how many requests fit a KV cache: up to `slots`, each of at most `longest` tokens."""

    def __init__(self, *, slots: int, longest: int) -> None:
        self._slots = slots
        self._longest = longest
        self._limits: deque[int] = deque(maxlen=slots)
        self._lengths: deque[int] = deque(maxlen=slots)
        self._running: set[RunningRequest] = set()

    def begin(self, *, prompt: int, longest: int) -> RunningRequest:
        """A request begins; the caller adds new tokens to its `length`."""
        sequence = RunningRequest(length=prompt, longest=longest)
        self._limits.append(longest)
        self._running.add(sequence)
        return sequence

    def end(self, sequence: RunningRequest, *, finished: bool) -> None:
        """Count an ended request; the length of a `finished` one (not aborted, not failed) informs the estimate."""
        self._running.discard(sequence)
        if finished:
            self._lengths.append(sequence.length)

    @property
    def expected(self) -> int:
        """Tokens that one more request is expected to need."""
        return max(self._lengths, default=max(self._limits, default=self._longest))

    def capacity(self, cache_tokens: int) -> int:
        """Requests that a cache of `cache_tokens` holds at once, running ones included; at least 1.

        Args:
            cache_tokens: 0 where the server does not report it: the slots are the only bound.
        """
        if not cache_tokens:
            return self._slots
        expected = self.expected
        reserved = sum(max(s.length, min(s.longest, expected)) for s in self._running)
        more = max(0, cache_tokens - reserved) // max(1, expected)
        return max(1, min(self._slots, len(self._running) + more))


class TokenRate:
    """Counts generated tokens."""

    def __init__(self) -> None:
        self.total = 0
        """Since the start."""
        self.per_s = 0.0
        """The rate over the last full span."""
        self._since, self._counted = time.monotonic(), 0

    def add(self, tokens: int) -> None:
        """Count `tokens` more."""
        self.total += tokens
        elapsed = time.monotonic() - self._since
        if elapsed >= RATE_SPAN_S:
            self.per_s = (self.total - self._counted) / elapsed
            self._since, self._counted = time.monotonic(), self.total
