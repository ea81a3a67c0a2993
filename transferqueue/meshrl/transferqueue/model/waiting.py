"""Waiting without polling: signals that changes ring, and the record of who waits for what."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from meshrl.contract.errors import WaitTimeoutError
from meshrl.transferqueue.model.group import Grant

TICK_S = 0.25
"""The longest time that may pass unwatched while leases are out."""
FINEST_TICK_S = 0.01
"""Deadlines are no more exact than this."""
SWEPT_GRANTS = 256
"""Up to so many grants nobody asks which of them have ended."""
RETURN_S = 2.0
"""So soon a worker whose connection broke must be heard of again: a dead one never is, a live one at once."""


class Signal:
    """Wakes everybody who waits for one kind of change, in the order in which they came."""

    def __init__(self) -> None:
        self._listeners: dict[asyncio.Future[None], None] = {}

    def notify(self) -> None:
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


async def any_signal(signals: Sequence[Signal], deadline: float, what: Callable[[], str]) -> None:
    """Return when one of `signals` rings.

    Raises:
        WaitTimeoutError: `deadline` (loop time) passed; says `what()` was waited for.
    """
    loop = asyncio.get_running_loop()
    if loop.time() >= deadline:
        raise WaitTimeoutError(f"timed out waiting for {what()}")
    listener: asyncio.Future[None] = loop.create_future()
    for signal in signals:
        signal.join(listener)
    try:
        async with asyncio.timeout_at(deadline):
            await listener
    except TimeoutError:
        raise WaitTimeoutError(f"timed out waiting for {what()}") from None
    finally:
        for signal in signals:
            signal.leave(listener)


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
    """One timer for all leases, on a clock of its own: seconds in which renewals could be heard.

    The timer ticks while leases are out, and a tick that comes late counts for no more than it was meant to take. So
    time in which this process was stopped, swapped out or starved ends no lease: the renewals of that time are read
    before the clock has gone on for long.

    A renewal only moves `held.deadline`; the heap's entry finds that out when it comes up, so renewing is free here.
    Grants that ended are swept out before they are more than those that have not: a fast run ends thousands in the
    time to live of one, and each would keep its group in memory until then.
    """

    def __init__(self, expired: Callable[[Grant], None]) -> None:
        self._expired = expired
        self._heap: list[tuple[float, int, Grant]] = []
        self._sweep_at = SWEPT_GRANTS
        self._numbers = itertools.count()
        self._timer: asyncio.Handle | None = None
        self._heard_s = 0.0
        self._read_at = 0.0
        self._tick_s = TICK_S
        self._deaf = False

    def now(self) -> float:
        """Seconds in which renewals could be heard; the clock of all deadlines."""
        at = asyncio.get_running_loop().time()
        self._heard_s += min(at - self._read_at, self._tick_s)
        self._read_at = at
        return self._heard_s

    def watch(self, held: Grant) -> None:
        """Call `expired(held)` when its deadline passes, unless it was given back by then."""
        heapq.heappush(self._heap, (held.deadline, next(self._numbers), held))
        if len(self._heap) > self._sweep_at:
            self._sweep()
        self._arm()

    def hasten(self, worker: str, before: float) -> None:
        """The connection of `worker` broke: what it was granted `before` (loop time) ends soon if it stays silent."""
        deadline = self.now() + RETURN_S
        for _, _, held in list(self._heap):
            silent = held.mask and held.worker == worker and held.since <= before
            if silent and deadline < held.deadline:
                held.deadline = deadline
                self.watch(held)

    def stop(self) -> None:
        """End no lease any more: from now on renewals cannot be heard."""
        self._deaf = True
        self._disarm()

    def clear(self) -> None:
        """Watch nothing any more."""
        self._heap.clear()
        self._disarm()

    def _sweep(self) -> None:
        """Forget the grants that ended; O(1) for each that was watched since the last time."""
        self._heap = [entry for entry in self._heap if entry[2].mask]
        heapq.heapify(self._heap)
        self._sweep_at = max(SWEPT_GRANTS, 2 * len(self._heap))

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self) -> None:
        if self._timer is None and self._heap and not self._deaf:
            left = self._heap[0][0] - self.now()
            self._tick_s = min(TICK_S, max(FINEST_TICK_S, left / 2))
            self._timer = asyncio.get_running_loop().call_later(self._tick_s, self._tick)

    def _tick(self) -> None:
        self._timer = None
        now = self.now()
        while self._heap and self._heap[0][0] <= now:
            _, number, held = heapq.heappop(self._heap)
            if not held.mask:
                continue
            if held.deadline > now:
                # Hastened and heard of again, it has another entry.
                heapq.heappush(self._heap, (held.deadline, number, held))
            else:
                self._expired(held)
        self._arm()
