"""Lets a service switch between shares of traced groups at a signal, and times what tracing does in it.

Python imports this by its name, from PYTHONPATH, in each service that `trace_cost.py` starts.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SHARES = [float(share) for share in os.environ["TRACE_SHARES"].split(",")]
FOLDER = Path(os.environ["TRACE_FOLDER"])
CALLED = ("row_span", "span", "record_rows", "record_step", "called", "metadata")
first: list[Any] = []
spent_ns = [0]
"""Processor time that tracing took: of the callers, and of the writer's threads."""


def timed(function: Callable[..., Any]) -> Callable[..., Any]:
    def run(*given: Any, **named: Any) -> Any:
        began = time.thread_time_ns()
        try:
            return function(*given, **named)
        finally:
            spent_ns[0] += time.thread_time_ns() - began

    return run


def switch(number: int, _: object) -> None:
    """In a thread: the one that was interrupted may hold a lock of the tracer."""
    threading.Thread(target=switch_to, args=(SHARES[number - signal.SIGRTMIN - 1],)).start()


def switch_to(share: float) -> None:
    """Write what is left, go on with another share, and say how much tracing took so far."""
    tracing = sys.modules.get("meshrl.common.tracing")
    if tracing is not None and (first or tracing._tracer):
        if not first:
            first.append(tracing._tracer)
            for name in CALLED:
                setattr(tracing, name, timed(getattr(tracing, name)))
            for name in ("__enter__", "__exit__"):
                setattr(tracing._Open, name, timed(getattr(tracing._Open, name)))
            tracing.Tracer._write_all = timed(tracing.Tracer._write_all)
        tracing.stop()
        tracing.start(first[0]._path.parent, first[0]._service, share)
    made = FOLDER / f"switching.{os.getpid()}"
    made.write_text(str(spent_ns[0]))
    made.replace(FOLDER / f"switched.{os.getpid()}")


for at in range(len(SHARES)):
    signal.signal(signal.SIGRTMIN + 1 + at, switch)
    signal.siginterrupt(signal.SIGRTMIN + 1 + at, False)
