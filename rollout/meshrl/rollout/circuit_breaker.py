"""The circuit breaker of one replica: an engine whose requests fail must not attract rows by failing fast.

             error rate of the last `window` requests            pause over
    CLOSED ──────────────────────────────────────────▶ OPEN ────────────────▶ HALF_OPEN: one row at a time
      ▲                                                 ▲  pauses double, up to `longest_pause_s` │   │
      │                                                 └──────────────── it failed ──────────────┘   │
      └──────────────────────────────────────────────────────────── a request succeeded ──────────────┘

consumes: how each request to the engine ended. waits for: nothing; a timer ends the pause. produces: how many more
rows the worker may hold, and whether a fault was the row's or the replica's.

Faults are the engine's own (`InfraError` and its kin): what a policy samples, a program raises or a caller asks
wrongly says nothing about the replica.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable
from enum import StrEnum

from meshrl.contract.errors import UnavailableError, UserError
from meshrl.contract.types import GenerateDelta, GenerateRequest, Uid, Version
from meshrl.rollout.config import BreakerConfig
from meshrl.rollout.ports import Generator
from meshrl.rollout.sampling import closing

log = logging.getLogger(__name__)

SPARED = 4
"""A row that fails here so often, while nothing succeeds, counts the first time and then not: the replica is suspect.
From there on it counts again, so that a row that breaks every engine is given up in the end."""
PROBES = 8
"""An engine that failed so many probes in a row is not coming back by itself: its process is to be replaced."""
FIRST_PROBES = 3
"""The same, of an engine that has answered nothing yet."""


class BreakerState(StrEnum):
    """What the breaker lets through."""

    CLOSED = "closed"
    """Everything."""
    OPEN = "open"
    """Nothing."""
    HALF_OPEN = "half_open"
    """One row, to see whether the engine has recovered."""


class Breaker:
    """Counts how requests end. Belongs to one event loop."""

    def __init__(
        self,
        config: BreakerConfig,
        *,
        wake: Callable[[], None],
        give_up: Callable[[str], None],
    ) -> None:
        """`wake` is called when more is let through; `give_up`, with the last fault, after so many probes in vain."""
        self.state = BreakerState.CLOSED
        self.last_fault = ""
        self.opened = 0
        """Times since the start."""
        self._config = config
        self._wake = wake
        self._give_up = give_up
        self._window: deque[bool] = deque(maxlen=config.window)
        """True for a fault."""
        self._least = max(2, config.window // 4)
        """Requests that say something of the rate."""
        self._openings = 0
        """Since the last full window without one: the next pause is so many times doubled."""
        self._good = 0
        """Requests that succeeded since the last fault."""
        self._probes = 0
        self._answered = False
        self._faults_of: dict[Uid, int] = {}
        """Of rows, since the last success."""
        self._timer: asyncio.TimerHandle | None = None

    @property
    def error_rate(self) -> float:
        """Share of the last requests that failed."""
        return sum(self._window) / len(self._window) if self._window else 0.0

    @property
    def pause_s(self) -> float:
        """How long the next opening lasts."""
        return min(self._config.pause_s * 2.0**self._openings, self._config.longest_pause_s)

    def allows(self, held: int, limit: int) -> int:
        """Rows that may be held beyond the `held` ones, of which the worker could hold `limit`."""
        if self.state is BreakerState.OPEN:
            return 0
        return (1 if self.state is BreakerState.HALF_OPEN else limit) - held

    def succeeded(self) -> None:
        """A request came to its end."""
        if self.state is BreakerState.OPEN:
            return  # it began before
        self._faults_of.clear()
        self._answered = True
        self._probes = 0
        self._good += 1
        if self._good >= self._config.window:
            self._openings = 0
        if self.state is BreakerState.HALF_OPEN:
            log.info("the engine answers again: leasing as before")
            self._window.clear()
            self._enter(BreakerState.CLOSED)
        self._window.append(False)

    def failed(self, reason: str) -> None:
        """A request ended with a fault of the engine."""
        self.last_fault = reason
        self._good = 0
        if self.state is BreakerState.OPEN:
            return
        self._window.append(True)
        if self.state is BreakerState.HALF_OPEN:
            self._probes += 1
            self._open()
        elif len(self._window) >= self._least and self.error_rate >= self._config.error_rate:
            self._open()

    def spares(self, uid: Uid) -> bool:
        """True when the fault that a row met is the replica's: its attempt does not count.

        Asked once per fault. A row's first fault under a closed breaker is the row's own.
        """
        seen = self._faults_of[uid] = self._faults_of.get(uid, 0) + 1
        return seen <= SPARED and (seen > 1 or self.state is not BreakerState.CLOSED)

    def close(self) -> None:
        """Stop the timer; idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _open(self) -> None:
        pause_s = self.pause_s
        self.opened += 1
        self._openings += 1
        faults, requests = sum(self._window), len(self._window)
        said = log.warning if self.state is BreakerState.CLOSED else log.info
        said(
            "%d of the last %d requests failed, the last one with: %s; leasing nothing for %.1f s",
            *(faults, requests, self.last_fault, pause_s),
        )
        self._enter(BreakerState.OPEN)
        self._timer = asyncio.get_running_loop().call_later(pause_s, self._half_open)
        if self._probes >= (PROBES if self._answered else FIRST_PROBES):
            self._give_up(self.last_fault)

    def _half_open(self) -> None:
        self._timer = None
        self._enter(BreakerState.HALF_OPEN)

    def _enter(self, state: BreakerState) -> None:
        self.state = state
        self._wake()


class WatchedGenerator:
    """A `Generator` for one row that tells the breaker how its requests ended."""

    def __init__(
        self, engine: Generator, breaker: Breaker, *, asked: Callable[[], None] | None = None
    ) -> None:
        """`asked` is called when the engine has taken a request."""
        self.faulted = False
        """A request ended with a fault of the engine."""
        self._engine = engine
        self._breaker = breaker
        self._asked = asked

    @property
    def version(self) -> Version:
        """The version that samples the next token."""
        return self._engine.version

    async def generate(self, request: GenerateRequest) -> AsyncIterator[GenerateDelta]:
        """Sample one response. One that its reader leaves, or the engine aborts, counts neither way."""
        try:
            async with closing(self._engine.generate(request)) as stream:
                if self._asked is not None:
                    self._asked()
                async for delta in stream:
                    if delta.finish_reason and delta.finish_reason != "abort":
                        self._breaker.succeeded()
                    yield delta
        except (UserError, UnavailableError):  # the caller's mistake; the end of this worker
            raise
        except Exception as error:
            self.faulted = True
            self._breaker.failed(f"{type(error).__name__}: {error}")
            raise
