"""Time and memory of a step, measured from inside the process that makes it. Linux only."""

from __future__ import annotations

import gc
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def resident() -> int:
    """Bytes in memory now."""
    return _field("VmRSS")


def forget_peak() -> None:
    """The high-water mark starts again from what is in memory now."""
    gc.collect()
    CLEAR.write_text("5")


def peak() -> int:
    """Most bytes in memory since `forget_peak`."""
    return _field("VmHWM")


def _field(name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB", STATUS.read_text(), re.MULTILINE)
    assert found is not None
    return 1024 * int(found.group(1))


def steps(step: Callable[[], dict[str, float]], count: int) -> dict[str, Any]:
    """Make `count` steps. Memory is that of all of them, above what is there now: the weights, for one."""
    forget_peak()
    before = resident()
    seconds, cpu_seconds, facts = [], [], []
    for _ in range(count):
        began, spent = time.perf_counter(), time.process_time()
        facts.append(step())
        seconds.append(time.perf_counter() - began)
        cpu_seconds.append(time.process_time() - spent)
    return {
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "facts": facts,
        "bytes_above_weights": peak() - before,
    }
