"""What is busy in a simulated fleet: the queue's processor, and engines whose requests share their speed."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Callable

from meshrl.planning.setting import Setting


class Processor:
    """The queue's processor: calls take their time one after the other."""

    def __init__(self, setting: Setting, loop: asyncio.AbstractEventLoop) -> None:
        self.busy_s = 0.0
        self._setting = setting
        self._free_at = 0.0
        self._loop = loop

    def charge(self, *, calls: float = 1, rows: int = 0) -> float:
        """Busy for these calls after what it has to do; returns how long from now until they are done."""
        cost = calls * self._setting.call_s + rows * self._setting.row_s
        now = self._loop.time()
        self._free_at = max(now, self._free_at) + cost
        self.busy_s += cost
        return self._free_at - now

    def charge_spread(self, calls: float) -> None:
        """Count calls that came one by one over a long time, which nobody had to wait for."""
        self.busy_s += calls * self._setting.call_s

    async def spend(self, *, calls: int = 1, rows: int = 0) -> None:
        """Wait until the calls have had their turn."""
        await asyncio.sleep(self.charge(calls=calls, rows=rows))


class PacedGpu:
    """An engine's speed, shared evenly by its running requests: a decode step takes the longer the more there are."""

    def __init__(self, *, slots: int, tokens_per_s: float, alone_speedup: float) -> None:
        self.running = 0
        self.tokens = 0.0
        self._slots = slots
        self._together = slots / tokens_per_s
        """Seconds for a token of each request while all slots are busy."""
        self._alone = self._together / alone_speedup
        self._loop = asyncio.get_running_loop()
        self._ends: list[tuple[float, int, Callable[[], None]]] = []
        self._number = itertools.count()
        self._served = 0.0
        """Tokens that a request would have which has run from the start on."""
        self._at = self._loop.time()
        self._paused = False
        self._timer: asyncio.Handle | None = None
        self._due = 0.0
        """When the timer looks. uvloop's handle of a timer that is due at once cannot say."""

    def sample(self, tokens: float, done: Callable[[], None]) -> None:
        """Sample so many tokens, then call `done`."""
        self.advance()
        self.running += 1
        heapq.heappush(self._ends, (self._served + tokens, next(self._number), done))
        self._arm()

    def pause(self, paused: bool) -> None:
        """Stand still, or go on."""
        self.advance()
        self._paused = paused
        self._arm()

    def stop(self) -> None:
        """Forget every request."""
        self.advance()
        self._ends.clear()
        self.running = 0
        self._arm()

    def _speed(self) -> float:
        """Tokens per second of each running request."""
        if self._paused or not self.running:
            return 0.0
        more = (self.running - 1) / (self._slots - 1) if self._slots > 1 else 1.0
        return 1 / (self._alone + (self._together - self._alone) * more)

    def advance(self) -> None:
        """Count what was sampled until now."""
        now = self._loop.time()
        gained = (now - self._at) * self._speed()
        self._served += gained
        self.tokens += gained * self.running
        self._at = now

    def _arm(self) -> None:
        """The next look is at the next end, or earlier: a timer that is too early stays."""
        speed = self._speed()
        if not speed:
            if self._timer:
                self._timer.cancel()
                self._timer = None
            return
        due = self._at + max(0.0, self._ends[0][0] - self._served) / speed
        if self._timer is not None:
            if self._due <= due:
                return
            self._timer.cancel()
        self._due = due
        self._timer = self._loop.call_at(due, self._look)

    def _look(self) -> None:
        self._timer = None
        self.advance()
        while self._ends and self._ends[0][0] <= self._served + 1e-6:
            _, _, done = heapq.heappop(self._ends)
            self.running -= 1
            done()
        self._arm()
