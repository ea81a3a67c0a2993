"""The circuit breaker of one replica: an engine that fails fast must not take rows from engines that work.

             error rate of the last `window` requests            pause over
    CLOSED ──────────────────────────────────────────▶ OPEN ────────────────▶ HALF_OPEN: one row at a time
      ▲                                                 ▲  pauses double, up to `longest_pause_s` │   │
      │                                                 └──────────────── it failed ──────────────┘   │
      └──────────────────────────────────────────────────────────── a request succeeded ──────────────┘

consumes: how each request to the engine ended. waits for: nothing; a timer ends the pause. produces: how many more
rows the worker may hold, and whether a fault was caused by the row or by the replica.

Only faults of the engine count (`InfraError` and other errors that it raises). What a policy samples, an exception of
a program and an invalid request say nothing about the replica.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable
from enum import StrEnum

from meshrl.contract.errors import EngineGoneError, UserError
from meshrl.contract.types import GenerateDelta, GenerateRequest, Uid, Version
from meshrl.rollout.config import CircuitBreakerConfig
from meshrl.rollout.ports import Generator
from meshrl.rollout.streams import closing

log = logging.getLogger(__name__)

SPARED = 4
"""Faults of a row of which only the first counts as an attempt, while no request succeeds and the replica is suspect.
Later ones count again, so that a row that breaks every engine is abandoned in the end."""
PROBES = 8
"""Failed probes in a row after which the engine's process must be replaced."""
FIRST_PROBES = 3
"""The same for an engine that has not completed any request yet."""


class CircuitState(StrEnum):
    """Which rows are admitted."""

    CLOSED = "closed"
    """All rows are admitted."""
    OPEN = "open"
    """No rows are admitted."""
    HALF_OPEN = "half_open"
    """One row, to test whether the engine has recovered."""


class CircuitBreaker:
    """Counts how requests end. Used on one event loop."""

    def __init__(
        self,
        config: CircuitBreakerConfig,
        *,
        wake: Callable[[], None],
        give_up: Callable[[str], None],
    ) -> None:
        """`wake` is called when more rows are admitted, `give_up(last fault)` after PROBES failed probes."""
        self.state = CircuitState.CLOSED
        self.last_fault = ""
        self.opened = 0
        """How often the breaker has opened since the start."""
        self._config = config
        self._wake = wake
        self._give_up = give_up
        self._window: deque[bool] = deque(maxlen=config.window)
        """True for a fault."""
        self._min_requests = max(2, config.window // 4)
        """Fewer requests than this say nothing about the rate."""
        self._openings = 0
        """Openings since the last full window of successes; the pause doubles with each."""
        self._successes = 0
        """Requests that succeeded since the last fault."""
        self._probes = 0
        self._answered = False
        self._faults_of: dict[Uid, int] = {}
        """Faults of each row since the last success."""
        self._timer: asyncio.TimerHandle | None = None

    @property
    def error_rate(self) -> float:
        """Share of the last requests that failed."""
        return sum(self._window) / len(self._window) if self._window else 0.0

    @property
    def pause_s(self) -> float:
        """Seconds that the breaker stays open next time."""
        return min(self._config.pause_s * 2.0**self._openings, self._config.longest_pause_s)

    def allows(self, held: int, limit: int) -> int:
        """How many rows may be leased in addition to the `held` ones; the worker could hold `limit`."""
        if self.state is CircuitState.OPEN:
            return 0
        return (1 if self.state is CircuitState.HALF_OPEN else limit) - held

    def succeeded(self) -> None:
        """Count a completed request."""
        if self.state is CircuitState.OPEN:
            return  # the request began before the breaker opened
        self._faults_of.clear()
        self._answered = True
        self._probes = 0
        self._successes += 1
        if self._successes >= self._config.window:
            self._openings = 0
        if self.state is CircuitState.HALF_OPEN:
            log.info("the engine works again: leasing rows as before")
            self._window.clear()
            self._enter(CircuitState.CLOSED)
        self._window.append(False)

    def failed(self, reason: str) -> None:
        """Count a request that ended with a fault of the engine; `reason` is for logs."""
        self.last_fault = reason
        self._successes = 0
        if self.state is CircuitState.OPEN:
            return
        self._window.append(True)
        if self.state is CircuitState.HALF_OPEN:
            self._probes += 1
            self._open()
        elif len(self._window) >= self._min_requests and self.error_rate >= self._config.error_rate:
            self._open()

    def spares(self, uid: Uid) -> bool:
        """Whether a row's fault is attributed to the replica, so that it is no attempt of the row.

        Called once per fault. A row's first fault while the breaker is closed is attributed to the row.
        """
        seen = self._faults_of[uid] = self._faults_of.get(uid, 0) + 1
        return seen <= SPARED and (seen > 1 or self.state is not CircuitState.CLOSED)

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
        write = log.warning if self.state is CircuitState.CLOSED else log.info
        write(
            "%d of the last %d requests failed, the last one with: %s; leasing no rows for %.1f s",
            faults,
            requests,
            self.last_fault,
            pause_s,
        )
        self._enter(CircuitState.OPEN)
        self._timer = asyncio.get_running_loop().call_later(pause_s, self._half_open)
        if self._probes >= (PROBES if self._answered else FIRST_PROBES):
            self._give_up(self.last_fault)

    def _half_open(self) -> None:
        self._timer = None
        self._enter(CircuitState.HALF_OPEN)

    def _enter(self, state: CircuitState) -> None:
        self.state = state
        self._wake()


class WatchedGenerator:
    """A `Generator` for one row that reports to the breaker how its requests ended."""

    def __init__(
        self,
        engine: Generator,
        breaker: CircuitBreaker,
        *,
        started: Callable[[], None] | None = None,
    ) -> None:
        """`started` is called when the engine has accepted a request."""
        self.faulted = False
        """A request ended with a fault of the engine."""
        self._engine = engine
        self._breaker = breaker
        self._started = started

    @property
    def version(self) -> Version:
        """The version that samples the next token."""
        return self._engine.version

    async def generate(self, request: GenerateRequest) -> AsyncIterator[GenerateDelta]:
        """Sample one response. An abandoned or aborted one is neither a success nor a fault."""
        try:
            async with closing(self._engine.generate(request)) as stream:
                if self._started is not None:
                    self._started()
                async for delta in stream:
                    if delta.finish_reason and delta.finish_reason != "abort":
                        self._breaker.succeeded()
                    yield delta
        except (UserError, EngineGoneError):  # an invalid request; the engine has stopped
            raise
        except Exception as error:
            self.faulted = True
            self._breaker.failed(f"{type(error).__name__}: {error}")
            raise
