"""Ends a worker whose event loop a user's function holds."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
import traceback
from types import FrameType
from typing import Self

log = logging.getLogger(__name__)

LIMIT_S = 300.0
LOOKS = 10
EXIT = 1


class LoopWatchdog:
    """Ends the process when a user's function holds the event loop that has entered it.

    An `async` function that computes or waits without `await` stops every row of its worker, its health and its
    drain. Rows are given to other workers by then, as their leases are not renewed; a supervisor restarts the worker.
    """

    def __init__(self, limit_s: float = LIMIT_S) -> None:
        """`limit_s`: the longest time that the loop may run nothing."""
        self._pause_s = limit_s / LOOKS
        self._limit_s = limit_s
        self._beats = 0
        self._over = threading.Event()
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._beat()
        threading.Thread(target=self._watch, name="loop-watchdog", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._timer:
            self._timer.cancel()

    def _beat(self) -> None:
        self._beats += 1
        self._timer = self._loop.call_later(self._pause_s, self._beat)

    def _watch(self) -> None:
        # Looks are counted, not seconds: a process that was stopped has not looked either.
        seen, without = 0, 0
        while not self._over.wait(self._pause_s):
            without = 0 if self._beats != seen else without + 1
            seen = self._beats
            if without == LOOKS:
                log.critical(
                    "the event loop has run nothing for %g s, so this worker ends; it is held by %s",
                    self._limit_s,
                    _held_by(sys._current_frames().get(self._thread)),
                )
                logging.shutdown()
                os._exit(EXIT)


def _held_by(frame: FrameType | None) -> str:
    """The last calls, the innermost first."""
    calls = traceback.extract_stack(frame, limit=None)[-4:]
    return ", called by ".join(
        f"{each.filename}:{each.lineno} {each.name}" for each in reversed(calls)
    )
