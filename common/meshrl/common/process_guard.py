"""No process outlives its parent, in whatever way that one ends: three forms of one guard.

    die_with_parent      a process of ours: the kernel kills it with its parent
    guarded_command      a command of others: a guard between, which ends it and all that it starts
    watchdog_command     process groups: a guard beside, which kills them after the death of their parent

    parent ──stdin──▶ command ──stdout──▶ guard ──▶ a log, or the parent
      └──── SIGTERM, or the kernel's word that the parent is dead ────▶ guard ──▶ SIGTERM, then SIGKILL to the family

Run as a file with the standard library only: a guard starts at once and stays small. Orphans become children of the
guard (Linux), so it ends those too that left its process group.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import FrameType

PARENT_VARIABLE = "MESHRL_PARENT_PID"
"""Set by a supervisor: its pid."""
DRAIN_AT_EOF = "MESHRL_DRAIN_AT_EOF"
"""Set by a supervisor on another machine: the end of its standard input drains this process, and SIGTERM does not.

An engine that ends a job sends SIGTERM to all services at once, the queue included, and to the supervisor too, which
drains them in order.
"""
GROUPS = "groups"
LOG_BYTES = 64 << 20
"""Size of a log that is moved aside; the one before it is lost."""
LAST_WORDS_S = 2.0
"""Seconds for the last output of an ended command."""
READ_BYTES = 1 << 16
POLL_S = 1.0
TOO_LONG = -32099
"""An error code in the range that JSON-RPC leaves to servers."""
ID = re.compile(rb'"id"\s*:\s*(\d+|"[^"]{1,64}")')
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
KILLED = 128 + signal.SIGKILL
supervised = False
"""A supervisor started this process, and says itself what becomes of the run."""


def die_with_parent(parent: int) -> None:
    """Ask the kernel for SIGKILL at the death of `parent`, the pid of the process that started this one.

    Linux only; elsewhere a parent that is dead already is noticed, no later death.
    """
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        # The parent died before the line above, so the signal will never come.
        os._exit(KILLED)


def die_with_supervisor() -> None:
    """Like `die_with_parent`, if a supervisor started this process; it says so in `PARENT_VARIABLE`."""
    global supervised
    if parent := os.environ.pop(PARENT_VARIABLE, None):
        supervised = True
        die_with_parent(int(parent))


def guarded_command(
    guarded: Sequence[str], *, grace_s: float, log: Path | None = None, line_bytes: int = 0
) -> list[str]:
    """The command line that runs `guarded` under a guard, to be started by this process.

    SIGTERM to the guard ends the whole family, and so does the end of the thread that starts it: Linux takes that for
    the parent's death. Its exit code is the command's, 128 + n for signal n.

    Args:
        guarded: What to run. It gets the guard's stdin.
        grace_s: Seconds between SIGTERM and SIGKILL.
        log: The file that stdout is opened as; gets stdout and stderr, and is moved aside to LOG.1 when it is long.
        line_bytes: Without a log: a longer line of stdout becomes a JSON-RPC error that answers the same request.
    """
    output = str(log.absolute() if log else line_bytes)  # a path is no number
    return [*_program(), str(os.getpid()), str(grace_s), output, *guarded]


def watchdog_command() -> list[str]:
    """The command line of a guard that reads `+PGID` and `-PGID` from stdin, whose end kills what is listed."""
    return [*_program(), GROUPS]


def _program() -> tuple[str, ...]:
    return (sys.executable, "-I", "-S", __file__)


def main() -> int:
    """Guard the groups that stdin lists, or run a command; its exit code."""
    if sys.argv[1] == GROUPS:
        return _guard_groups(sys.stdin)
    parent, grace_s, output, *guarded = sys.argv[1:]
    return _guard(int(parent), float(grace_s), output, guarded)


def _guard_groups(lines: Iterable[str]) -> int:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    groups: set[int] = set()
    for line in lines:
        if line[0] == "+":
            groups.add(int(line[1:]))
        else:
            groups.discard(int(line[1:]))
    for group in groups:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
    return 0


def _guard(parent: int, grace_s: float, output: str, guarded: Sequence[str]) -> int:
    if os.getpgrp() != os.getpid():
        os.setpgrp()

    def end(number: int, frame: FrameType | None) -> None:
        # A function, not SIG_IGN, which a command that starts now would inherit.
        signal.signal(signal.SIGTERM, lambda *_: None)
        os.killpg(0, signal.SIGTERM)
        signal.setitimer(signal.ITIMER_REAL, max(grace_s, 0.001))

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGALRM, lambda *_: _kill_family())
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    _prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        return KILLED  # the parent died before the line above
    if sys.platform != "linux":
        threading.Thread(target=_poll, args=(parent,), daemon=True).start()
    log = None if output.isdigit() else Path(output)
    printed, printing = os.pipe()
    try:
        child = subprocess.Popen(
            guarded,
            stdout=printing,
            stderr=printing if log else None,
            preexec_fn=functools.partial(die_with_parent, os.getpid()),
        )
    except OSError as error:
        print(f"cannot start {guarded[0]}: {error}", file=sys.stderr)
        return 127
    os.close(printing)
    # In a thread: processes that the command started may keep the pipe open after its end.
    copying = threading.Thread(
        target=copy_to_log if log else copy_lines,
        args=(printed, 1, log or int(output)),
        daemon=True,
    )
    copying.start()
    code = child.wait()
    _kill_children()
    copying.join(LAST_WORDS_S)
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


def copy_lines(printed: int, target: int, most: int) -> None:
    """Copy lines; one with more than `most` bytes becomes an error that answers the same request."""
    line, size = bytearray(), 0
    while chunk := os.read(printed, READ_BYTES):
        for part in chunk.splitlines(keepends=True):
            size += len(part)
            # The beginning of a line that is too long is kept, for its id.
            line += part if size <= most else part[: max(0, READ_BYTES - len(line))]
            if part.endswith(b"\n"):
                _write(target, bytes(line) if size <= most else _too_long(bytes(line), size, most))
                line, size = bytearray(), 0


def _too_long(line: bytes, size: int, most: int) -> bytes:
    found = ID.search(line[:READ_BYTES]) or ID.search(line[-READ_BYTES:])
    problem = f"the answer has {size} bytes, more than {most}"
    error = json.dumps({"code": TOO_LONG, "message": problem}).encode()
    number = found[1] if found else b"null"
    return b'{"jsonrpc": "2.0", "id": ' + number + b', "error": ' + error + b"}\n"


def _write(target: int, data: bytes) -> None:
    # A parent that has closed the pipe: the command sees the end of its stdin.
    with contextlib.suppress(BrokenPipeError):
        while data:
            data = data[os.write(target, data) :]


def _poll(parent: int) -> None:
    """End like at the kernel's signal, on systems without it."""
    while os.getppid() == parent:
        time.sleep(POLL_S)
    os.kill(os.getpid(), signal.SIGTERM)


def _kill_family() -> None:
    """Kill all descendants, and this process with its group."""
    _kill_children()
    os.killpg(0, signal.SIGKILL)


def _kill_children() -> None:
    """Kill all descendants: those of killed processes become children."""
    while children := _children():
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        for child in children:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(child, 0)


def _children() -> list[int]:
    """Children of the main thread, which starts them all; none where the system does not tell."""
    try:
        return list(map(int, Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()))
    except OSError:
        return []  # not Linux


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    sys.exit(main())
