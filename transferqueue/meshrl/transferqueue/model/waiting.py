"""Waiting without polling: signals, the list of calls that wait, and the timer of all leases."""

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
"""The longest time between two ticks while leases are out."""
FINEST_TICK_S = 0.01
"""The shortest time between two ticks: deadlines are no more exact than this."""
SWEPT_GRANTS = 256
"""With at most so many grants in the heap, those that have ended are not swept out."""
RETURN_S = 2.0
"""A worker whose connection broke must renew within this time. One that lives does at once, one that died never."""


class Signal:
    """Wakes all callers that wait for one kind of change, in the order in which they came."""

    def __init__(self) -> None:
        self._listeners: dict[asyncio.Future[None], None] = {}

    def notify(self) -> None:
        """Something changed: wake every listener."""
        if self._listeners:
            listeners, self._listeners = self._listeners, {}
            for listener in listeners:
                if not listener.done():
                    listener.set_result(None)

    def join(self, listener: asyncio.Future[None]) -> None:
        """Complete `listener` at the next `notify`."""
        self._listeners[listener] = None

    def leave(self, listener: asyncio.Future[None]) -> None:
        """Forget `listener`."""
        self._listeners.pop(listener, None)


async def any_signal(signals: Sequence[Signal], deadline: float, what: Callable[[], str]) -> None:
    """Return when one of `signals` is notified.

    Raises:
        WaitTimeoutError: `deadline` (loop time) passed; the message names `what()`.
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
    """One call that waits."""

    kind: str
    """take | admit | lease"""
    runs: tuple[str, ...]
    who: str
    since: float
    reason: Callable[[], str]


class Waits:
    """All calls that wait, for `why_waiting`."""

    def __init__(self) -> None:
        self._waits: dict[int, Wait] = {}
        self._numbers = itertools.count()

    @contextmanager
    def tracked(self, wait: Wait) -> Iterator[None]:
        """Register `wait` for as long as the block runs."""
        number = next(self._numbers)
        self._waits[number] = wait
        try:
            yield
        finally:
            del self._waits[number]

    def of(self, run: str) -> list[Wait]:
        """The waits for `run`."""
        return [wait for wait in self._waits.values() if run in wait.runs]


class Expiry:
    """One timer for all leases, on a clock of its own: seconds in which the queue could receive renewals.

    The timer ticks while leases are out. A tick that comes late advances the clock only by the time that was planned
    for it. So time in which this process was stopped, swapped out or starved expires no lease: the renewals of that
    time are read before the clock has advanced far.

    A renewal only moves `grant.deadline`. The heap's entry is compared with it when it reaches the top, so a renewal
    costs nothing here. Ended grants are swept out before they outnumber the others: a fast run ends thousands in the
    time to live of one lease, and each would keep its group in memory until then.
    """

    def __init__(self, expired: Callable[[Grant], None]) -> None:
        self._expired = expired
        self._heap: list[tuple[float, int, Grant]] = []
        self._sweep_at = SWEPT_GRANTS
        self._numbers = itertools.count()
        self._timer: asyncio.Handle | None = None
        self._clock_s = 0.0
        self._read_at = 0.0
        self._tick_s = TICK_S
        self._stopped = False

    def now(self) -> float:
        """Seconds in which the queue could receive renewals; the clock of all deadlines."""
        at = asyncio.get_running_loop().time()
        self._clock_s += min(at - self._read_at, self._tick_s)
        self._read_at = at
        return self._clock_s

    def watch(self, grant: Grant) -> None:
        """Call `expired(grant)` when its deadline passes, unless it has ended by then."""
        heapq.heappush(self._heap, (grant.deadline, next(self._numbers), grant))
        if len(self._heap) > self._sweep_at:
            self._sweep()
        self._arm()

    def hasten(self, worker: str, before: float) -> None:
        """The connection of `worker` broke: its grants up to `before` (loop time) expire soon unless it renews."""
        deadline = self.now() + RETURN_S
        for _, _, grant in list(self._heap):
            affected = grant.mask and grant.worker == worker and grant.since <= before
            if affected and deadline < grant.deadline:
                grant.deadline = deadline
                self.watch(grant)

    def stop(self) -> None:
        """Expire no lease any more: from now on the queue cannot receive renewals."""
        self._stopped = True
        self._disarm()

    def clear(self) -> None:
        """Forget every grant."""
        self._heap.clear()
        self._disarm()

    def _sweep(self) -> None:
        """Drop the grants that ended; O(1) for each grant that was added since the last sweep."""
        self._heap = [entry for entry in self._heap if entry[2].mask]
        heapq.heapify(self._heap)
        self._sweep_at = max(SWEPT_GRANTS, 2 * len(self._heap))

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self) -> None:
        if self._timer is None and self._heap and not self._stopped:
            left = self._heap[0][0] - self.now()
            self._tick_s = min(TICK_S, max(FINEST_TICK_S, left / 2))
            self._timer = asyncio.get_running_loop().call_later(self._tick_s, self._tick)

    def _tick(self) -> None:
        self._timer = None
        now = self.now()
        while self._heap and self._heap[0][0] <= now:
            _, number, grant = heapq.heappop(self._heap)
            if not grant.mask:
                continue
            if grant.deadline > now:
                # It was renewed since this entry was made.
                heapq.heappush(self._heap, (grant.deadline, number, grant))
            else:
                self._expired(grant)
        self._arm()
