"""Runs a command in a process group that ends with its parent: `subprocess_guard.py LOG COMMAND …`, stdin a pipe.

Standard library only, so that it starts at once and stays small. What the command prints goes to LOG, which is moved
aside to LOG.1 when it is long. When stdin ends (the parent closed it, or died in
any way) the group gets SIGTERM, then SIGKILL. When the command ends by itself, its parent kills what is left of the
group, whose number is the guard's pid: the guard cannot both report an exit code and kill its own group.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

GRACE_S = 5.0
"""Seconds between SIGTERM and SIGKILL."""
LOG_BYTES = 64 << 20
"""Of a log that is moved aside; the one before it is lost."""
LAST_WORDS_S = 2.0
"""For what an ended command has printed; a process that it has left behind may keep the pipe open."""
READ_BYTES = 1 << 16
PR_SET_PDEATHSIG = 1


def main() -> int:
    """Run `sys.argv[2:]`, with the log `sys.argv[1]`; its exit code, 128 + n for signal n."""
    if os.getpgrp() != os.getpid():
        os.setpgrp()
    # A function, not SIG_IGN, which the command would inherit.
    signal.signal(signal.SIGTERM, lambda *_: None)
    log, *command = sys.argv[1:]
    printed, printing = os.pipe()
    child = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=printing,
        stderr=printing,
        preexec_fn=_die_with_guard if sys.platform == "linux" else None,
    )
    os.close(printing)
    logger = threading.Thread(target=copy_to_log, args=(printed, 1, Path(log)), daemon=True)
    logger.start()
    parent_gone = threading.Event()
    threading.Thread(target=_watch_parent, args=(child, parent_gone), daemon=True).start()
    code = child.wait()
    logger.join(LAST_WORDS_S)
    if parent_gone.is_set():
        os.killpg(0, signal.SIGKILL)
    return code if code >= 0 else 128 - code


def copy_to_log(printed: int, log: int, path: Path) -> None:
    """Copy what is printed to the log, opened at `path`, until there is no more. What a full disk refuses is lost."""
    size = os.fstat(log).st_size
    while chunk := os.read(printed, READ_BYTES):
        if size > LOG_BYTES:
            with contextlib.suppress(OSError):
                # It is not there where it was moved aside already, and the next one could not be opened.
                if path.exists():
                    path.replace(f"{path}.1")
                log, last = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666), log
                os.close(last)
                size = 0
        with contextlib.suppress(OSError):
            size += os.write(log, chunk)


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
