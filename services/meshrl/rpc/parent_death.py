"""Prevents orphans: the kernel kills a process that calls this when its parent dies, in whatever way."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
PARENT_VARIABLE = "MESHRL_PARENT_PID"
"""Set by the supervisor: its pid."""
DRAIN_AT_EOF = "MESHRL_DRAIN_AT_EOF"
"""Set by a supervisor on another machine: the end of its standard input drains this process, and SIGTERM does not.

An engine that ends a job sends SIGTERM to all services at once, the queue included, and to the supervisor too, which
drains them in order.
"""


def die_with_parent() -> None:
    """Ask the kernel for SIGKILL at the parent's death, if a supervisor started this process.

    Linux only. On other systems only the supervisor's watchdog kills orphans.
    """
    parent = os.environ.pop(PARENT_VARIABLE, None)
    if parent is None or not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(parent):
        # The parent died before the line above, so the signal will never come.
        os._exit(128 + signal.SIGKILL)
