"""The pace at which somebody must read an answer, over gRPC and over HTTP: what is not read stays in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

PATIENCE_S: Final = 60.0
"""Seconds that a reader may be late."""
LEAST_RATE: Final = 1 << 20
"""Bytes a second."""


class Pace:
    """Calls `late` when a reader has read an answer so much later than LEAST_RATE permits.

    The reader begins with PATIENCE_S. Each second that something takes costs one of it, each LEAST_RATE bytes of it
    give one back, up to PATIENCE_S.
    """

    def __init__(self, late: Callable[[], object]) -> None:
        self._late = late
        self._left_s = PATIENCE_S
        self._began = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def sends(self, nbytes: int) -> None:
        """So much is on its way."""
        loop = asyncio.get_running_loop()
        self._began = loop.time()
        self._left_s += nbytes / LEAST_RATE
        self._timer = loop.call_later(self._left_s, self._late)

    def sent(self) -> None:
        """It is there, or nobody waits for it. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            took_s = asyncio.get_running_loop().time() - self._began
            self._left_s = min(PATIENCE_S, self._left_s - took_s)
