"""The machine during a measurement: its load, and the processor time that others took. Linux only.

Two sides that take turns are disturbed by others at different moments, so a ratio of their wall times that was taken
beside others says little. Processor seconds are disturbed least.
"""

from __future__ import annotations

import os
import resource
import time
from pathlib import Path
from typing import Any

BUSY_SHARE = 0.1
"""A machine is busy where others take more of its processor time than this."""
STAT = Path("/proc/stat")
IDLE = (3, 4)
"""Fields of the machine's processor time in which nothing ran: idle, and waiting for a disk."""
FIELDS = 8
"""Fields that are read; the next ones count guests, a part of others, a second time."""


class Neighbours:
    """The other users of the machine, watched from where this is made."""

    def __init__(self) -> None:
        """Read the load before."""
        self._load = os.getloadavg()[0]
        self._began, self._others = time.monotonic(), _others_s()

    def seen(self) -> dict[str, Any]:
        """The fields of a result that tell of the machine until now; prints a line where it was busy.

        The benchmark's own processes have ended by now: those that run still, or that nobody waited for, count as
        others.
        """
        cores = os.cpu_count() or 1
        available = cores * (time.monotonic() - self._began)
        share = max(0.0, (_others_s() - self._others) / available)
        busy, after = share > BUSY_SHARE, os.getloadavg()[0]
        if busy:
            print(
                f"busy machine: others took {share:.0%} of its {cores} cores (load {self._load:.1f} before, "
                f"{after:.1f} after); the wall times and their ratios are worth little, processor seconds more",
                flush=True,
            )
        load = {"before": round(self._load, 1), "after": round(after, 1)}
        return {"busy": busy, "load": load, "others_share": round(share, 2)}


def _others_s() -> float:
    """Processor seconds of the machine without those of this process and its ended descendants."""
    fields = list(map(int, STAT.read_text().split("\n", 1)[0].split()[1 : FIELDS + 1]))
    ran = sum(fields) - sum(fields[at] for at in IDLE)
    return ran / os.sysconf("SC_CLK_TCK") - own_s()


def own_s() -> float:
    """Processor seconds of this process and of those of its descendants that have ended and were waited for."""
    spent = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(each.ru_utime + each.ru_stime for each in spent)
