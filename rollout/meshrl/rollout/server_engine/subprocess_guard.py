"""Runs a command in a process group that ends with its parent: `python subprocess_guard.py COMMAND …`, stdin a pipe.

Standard library only, so that it starts at once and stays small. When stdin ends (the parent closed it, or died in
any way) the group gets SIGTERM, then SIGKILL. When the command ends by itself, its parent kills what is left of the
group, whose number is the guard's pid: the guard cannot both report an exit code and kill its own group.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading

GRACE_S = 5.0
"""Seconds between SIGTERM and SIGKILL."""
PR_SET_PDEATHSIG = 1


def main() -> int:
    """Run `sys.argv[1:]`; its exit code, 128 + n for signal n."""
    if os.getpgrp() != os.getpid():
        os.setpgrp()
    # A function, not SIG_IGN, which the command would inherit.
    signal.signal(signal.SIGTERM, lambda *_: None)
    child = subprocess.Popen(
        sys.argv[1:],
        stdin=subprocess.DEVNULL,
        preexec_fn=_die_with_guard if sys.platform == "linux" else None,
    )
    parent_gone = threading.Event()
    threading.Thread(target=_watch_parent, args=(child, parent_gone), daemon=True).start()
    code = child.wait()
    if parent_gone.is_set():
        os.killpg(0, signal.SIGKILL)
    return code if code >= 0 else 128 - code


def _watch_parent(child: subprocess.Popen[bytes], gone: threading.Event) -> None:
    while os.read(0, 4096):
        pass
    gone.set()
    os.killpg(0, signal.SIGTERM)
    try:
        child.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        os.killpg(0, signal.SIGKILL)


def _die_with_guard() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
