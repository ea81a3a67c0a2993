"""Calls a remote judge: one deadline over all tries, retries with growing pauses, and a circuit breaker.

    closed ──`failures` in a row──▶ open ──after `cooldown_s`──▶ half open ──one success──▶ closed
                                     ▲                              └────────one failure──▶ open

While the circuit is open, calls fail at once with the failure that opened it. So nobody waits for a judge that is
down, and it is not flooded when it comes back. An error that a retry cannot repair (a wrong request) is not retried
and does not count.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from meshrl.common.config import Config
from meshrl.contract.errors import MeshError, UnavailableError

log = logging.getLogger(__name__)
T = TypeVar("T")


class RetryConfig(Config):
    """Deadline, retries and circuit breaker of a remote judge."""

    deadline_s: PositiveFloat = 60.0
    """Seconds for one sample (or one batch), all tries together."""
    retries: NonNegativeInt = 3
    """Tries after the first, for temporary failures: no connection, 408, 425, 429, 5xx."""
    pause_s: NonNegativeFloat = 0.5
    """Seconds before the first retry; doubled each time, up to `max_pause_s`; half of each pause is random."""
    max_pause_s: PositiveFloat = 20.0
    failures: PositiveInt = 8
    """Failures in a row, over all samples, that open the circuit."""
    cooldown_s: PositiveFloat = 10.0
    """Seconds until an open circuit lets one call through."""


class Retrier:
    """One per remote judge."""

    def __init__(self, name: str, config: RetryConfig) -> None:
        """`name` stands for the judge in messages."""
        self._name = name
        self._config = config
        self._failures = 0
        self._last = ""
        self._open_until = 0.0
        self._probing = False
        self._draw = random.Random(name)

    async def ask(self, call: Callable[[], Awaitable[T]]) -> T:
        """The answer of `call`, which is retried as the config allows.

        Raises:
            TimeoutError: the deadline passed.
            UnavailableError: the circuit is open, or the last try failed; says why.
            MeshError: what `call` raised, if a retry cannot repair it.
        """
        async with asyncio.timeout(self._config.deadline_s):
            for number in range(self._config.retries + 1):
                if number:
                    await asyncio.sleep(self._pause(number))
                probe = self._enter()
                try:
                    answer = await call()
                except MeshError as error:
                    if not error.retryable:
                        self._succeeded()  # the judge answers, so the circuit stays closed
                        raise
                    self._failed(str(error))
                except asyncio.CancelledError:
                    self._failed(f"no answer within {self._config.deadline_s:g} s")
                    raise
                else:
                    self._succeeded()
                    return answer
                finally:
                    if probe:
                        self._probing = False
        raise UnavailableError(f"{self._name}: {self._last} ({self._config.retries + 1} tries)")

    def _pause(self, number: int) -> float:
        pause = min(self._config.pause_s * 2.0 ** (number - 1), self._config.max_pause_s)
        return pause * (0.5 + 0.5 * self._draw.random())

    def _enter(self) -> bool:
        """Raise if the circuit is open; True for the one call that probes whether the judge is back."""
        if self._failures < self._config.failures:
            return False
        left = self._open_until - time.monotonic()
        if left > 0 or self._probing:
            raise UnavailableError(
                f"{self._name} failed {self._failures} times in a row: it is not called"
                f" for {max(left, 0):.1f} s more: {self._last}"
            )
        self._probing = True
        return True

    def _failed(self, why: str) -> None:
        self._failures += 1
        self._last = why
        if self._failures >= self._config.failures:
            if self._failures == self._config.failures:
                log.warning("%s failed %d times in a row: %s", self._name, self._failures, why)
            self._open_until = time.monotonic() + self._config.cooldown_s

    def _succeeded(self) -> None:
        self._failures = 0
