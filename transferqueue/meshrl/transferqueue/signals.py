"""How a call waits: for a signal and a deadline."""

from __future__ import annotations

import asyncio
import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from meshrl.contract.errors import WaitTimeoutError


class Signal:
    """Wakes all callers that wait for one kind of change, in the order in which they came."""

    def __init__(self) -> None:
        self.listeners: dict[asyncio.Future[None], None] = {}
        """Futures that the next `notify` completes and forgets."""

    def join(self, listener: asyncio.Future[None]) -> None:
        """Complete `listener` at the next change."""
        self.listeners[listener] = None

    def leave(self, listener: asyncio.Future[None]) -> None:
        """Remove a listener that continued or gave up."""
        self.listeners.pop(listener, None)

    def notify(self) -> None:
        """Something changed: wake every listener."""
        if self.listeners:
            listeners, self.listeners = self.listeners, {}
            for listener in listeners:
                if not listener.done():
                    listener.set_result(None)


class Turns:
    """Callers that wait for rows look one after the other, so that not all of them wake for rows that a few will get.

    A caller that was woken looks in the moment in which it continues: it awaits nothing before. Then the next one is
    woken, while there is something `left`. Who waits `ahead` looks before those in `line`.
    """

    def __init__(self, left: Callable[[], object]) -> None:
        self._left = left
        self.last = self._until = 0
        """The number of the caller that came last, and of the last one that may look."""
        self.on_the_way: asyncio.Future[None] | None = None
        self.ahead, self.line = _Line(self), _Line(self)

    def notify(self) -> None:
        """Wake all waiting callers."""
        self._until = self.last
        self.wake()

    def notify_one(self) -> None:
        """Wake the caller that has waited longest."""
        if self.line.waiting:
            self._until = max(self._until, next(iter(self.line.waiting.values())))
            self.wake()

    def looked(self) -> None:
        """Note that the woken caller has continued or given up."""
        self.on_the_way = None
        self.wake()

    def wake(self) -> None:
        """Wake the next caller, if there is something for it and nobody else is on the way."""
        if self.on_the_way is not None or not self._left():
            return
        for waiting in (self.ahead.waiting, self.line.waiting):
            listener, number = next(iter(waiting.items()), (None, 0))
            if listener is not None and number <= self._until:
                del waiting[listener]
                self.on_the_way = listener
                if not listener.done():
                    listener.set_result(None)
                return


class _Line(Signal):
    """Waiting calls, each with a number that rises in both lines of `turns`."""

    def __init__(self, turns: Turns) -> None:
        super().__init__()
        self._turns = turns
        self.waiting: OrderedDict[asyncio.Future[None], int] = OrderedDict()
        """An OrderedDict finds its first entry at once, however many left."""

    def join(self, listener: asyncio.Future[None]) -> None:
        self._turns.last += 1
        self.waiting[listener] = self._turns.last

    def leave(self, listener: asyncio.Future[None]) -> None:
        self.waiting.pop(listener, None)
        if listener is self._turns.on_the_way:
            listener.get_loop().call_soon(self._turns.looked)


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
    due_by: Callable[[], int]
    """A take that waits for the groups sampled from this step or an earlier one on says which; negative: for any."""


def _any_group() -> int:
    return -1


class Waits:
    """All calls that wait, for `why_waiting`."""

    def __init__(self) -> None:
        self._waits: dict[int, Wait] = {}
        self._numbers = itertools.count()

    @contextmanager
    def tracked(
        self,
        kind: str,
        runs: Sequence[str],
        who: str,
        reason: Callable[[], str],
        due_by: Callable[[], int] = _any_group,
    ) -> Iterator[None]:
        """Register a call that waits for as long as the block runs."""
        number = next(self._numbers)
        since = asyncio.get_running_loop().time()
        self._waits[number] = Wait(
            kind=kind, runs=tuple(runs), who=who, since=since, reason=reason, due_by=due_by
        )
        try:
            yield
        finally:
            del self._waits[number]

    def of(self, run: str) -> list[Wait]:
        """The waits for `run`."""
        return [wait for wait in self._waits.values() if run in wait.runs]
