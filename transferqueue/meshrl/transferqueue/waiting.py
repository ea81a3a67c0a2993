"""Waiting without polling: bells that changes ring, and the record of who waits for what."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from meshrl.contract.errors import WaitTimeoutError
from meshrl.transferqueue.group import Grant

STALL_S = 0.1
"""A timer that fires so much too late says that this process stood still (stopped, swapped, starved)."""


class Bell:
    """Wakes everybody who waits for one kind of change, in the order in which they came."""

    def __init__(self) -> None:
        self._listeners: dict[asyncio.Future[None], None] = {}

    def ring(self) -> None:
        """Something changed; listeners look again."""
        if self._listeners:
            listeners, self._listeners = self._listeners, {}
            for listener in listeners:
                if not listener.done():
                    listener.set_result(None)

    def join(self, listener: asyncio.Future[None]) -> None:
        """Complete `listener` at the next ring."""
        self._listeners[listener] = None

    def leave(self, listener: asyncio.Future[None]) -> None:
        """Forget `listener`."""
        self._listeners.pop(listener, None)


async def any_bell(bells: Sequence[Bell], deadline: float, what: Callable[[], str]) -> None:
    """Return when one of `bells` rings.

    Raises:
        WaitTimeoutError: `deadline` (loop time) passed; says `what()` was waited for.
    """
    loop = asyncio.get_running_loop()
    if loop.time() >= deadline:
        raise WaitTimeoutError(f"timed out waiting for {what()}")
    listener: asyncio.Future[None] = loop.create_future()
    for bell in bells:
        bell.join(listener)
    try:
        async with asyncio.timeout_at(deadline):
            await listener
    except TimeoutError:
        raise WaitTimeoutError(f"timed out waiting for {what()}") from None
    finally:
        for bell in bells:
            bell.leave(listener)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """A call that waits now."""

    kind: str
    """take | admit | lease"""
    runs: tuple[str, ...]
    who: str
    since: float
    reason: Callable[[], str]


class Waits:
    """Everybody who waits, for `why_waiting`."""

    def __init__(self) -> None:
        self._waits: dict[int, Wait] = {}
        self._numbers = itertools.count()

    @contextmanager
    def tracked(self, wait: Wait) -> Iterator[None]:
        """Registered for as long as the block runs."""
        number = next(self._numbers)
        self._waits[number] = wait
        try:
            yield
        finally:
            del self._waits[number]

    def of(self, run: str) -> list[Wait]:
        """Those that concern `run`."""
        return [wait for wait in self._waits.values() if run in wait.runs]


class Expiry:
    """One timer for all leases: it sleeps until the earliest deadline.

    A renewal only moves `held.deadline`; the heap's entry finds that out when it comes up, so renewing is free here.
    When the queue itself stood still, renewals wait unread behind the timer: each lease is then spared once, for as
    long again as the standstill lasted.
    """

    def __init__(self, expired: Callable[[Grant], None]) -> None:
        self._expired = expired
        self._heap: list[tuple[float, int, Grant]] = []
        self._numbers = itertools.count()
        self._timer: asyncio.Handle | None = None
        self._due = math.inf
        """When the timer fires. Kept here: uvloop's handle of a moment that has passed cannot tell."""

    def watch(self, held: Grant) -> None:
        """Call `expired(held)` when its deadline passes, unless it was given back by then."""
        heapq.heappush(self._heap, (held.deadline, next(self._numbers), held))
        self._arm()

    def clear(self) -> None:
        """Watch nothing any more."""
        self._heap.clear()
        self._arm()

    def _arm(self) -> None:
        due = self._heap[0][0] if self._heap else math.inf
        if self._timer is not None:
            if self._due <= due < math.inf:
                return
            self._timer.cancel()
            self._timer = None
        if due < math.inf:
            self._due = due
            self._timer = asyncio.get_running_loop().call_at(due, self._fire)

    def _fire(self) -> None:
        now = asyncio.get_running_loop().time()
        late = now - self._due
        self._timer = None
        while self._heap and self._heap[0][0] <= now:
            _, number, held = heapq.heappop(self._heap)
            if not held.mask:
                continue
            if late > STALL_S and not held.spared:
                held.spared = True
                held.deadline = max(held.deadline, now + late)
            if held.deadline > now:
                heapq.heappush(self._heap, (held.deadline, number, held))
            else:
                self._expired(held)
        self._arm()
