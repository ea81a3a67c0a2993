"""Runs an MCP server that cannot outlive its worker: `python leash.py WORKER_PID MOST_BYTES COMMAND …`.

    worker ──stdin──▶ server ──stdout──▶ leash ──stdout──▶ worker
                                           └ a line of more than MOST_BYTES is answered with an error instead

Standard library only, so that it starts at once and stays small. Whatever way worker or server end, everything that
the server started ends too, also what left its process group: orphans become the leash's children (Linux).
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
GRACE_S = 1.0
"""For a server that is told to end, and for its last words."""
PIECE = 1 << 16
TOO_LONG = -32099
"""In the range that JSON-RPC leaves to servers."""
ID = re.compile(rb'"id"\s*:\s*(\d+|"[^"]{1,64}")')


def main() -> int:
    """Run the command with our stdin; exits as it does (128 + n for signal n)."""
    worker, most, command = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    killed = 128 + signal.SIGKILL
    # SIGTERM goes to the whole group, the server included; what ignores it is killed. SIG_IGN would be inherited.
    signal.signal(signal.SIGTERM, lambda *_: signal.setitimer(signal.ITIMER_REAL, GRACE_S))
    signal.signal(signal.SIGALRM, lambda *_: _end(killed))
    signal.signal(signal.SIGUSR1, lambda *_: _end(killed))
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    _prctl(PR_SET_PDEATHSIG, signal.SIGUSR1)
    if os.getppid() != worker:
        return killed  # it died before the line above
    try:
        server = subprocess.Popen(command, stdout=subprocess.PIPE, preexec_fn=_die_with_leash)
    except OSError as error:
        print(f"cannot start {command[0]}: {error}", file=sys.stderr)
        return 127
    assert server.stdout is not None
    ends = (server.stdout.fileno(), sys.stdout.fileno())
    # Beside the wait: what the server started may hold its stdout open when it is gone.
    passing = threading.Thread(target=pass_on, args=(*ends, most), daemon=True)
    passing.start()
    code = server.wait()
    _kill_children()
    passing.join(GRACE_S)
    return code if code >= 0 else 128 - code


def pass_on(source: int, target: int, most: int) -> None:
    """Copy lines; one with more than `most` bytes becomes an error that answers the same request."""
    line, size = bytearray(), 0
    while piece := os.read(source, PIECE):
        for part in piece.splitlines(keepends=True):
            size += len(part)
            # Of a line that is too long its beginning is kept, for the id.
            line += part if size <= most else part[: max(0, PIECE - len(line))]
            if part.endswith(b"\n"):
                _write(target, bytes(line) if size <= most else _too_long(bytes(line), size, most))
                line, size = bytearray(), 0


def _too_long(line: bytes, size: int, most: int) -> bytes:
    found = ID.search(line[:PIECE]) or ID.search(line[-PIECE:])
    problem = f"the answer has {size} bytes, more than {most}"
    error = json.dumps({"code": TOO_LONG, "message": problem}).encode()
    number = found[1] if found else b"null"
    return b'{"jsonrpc": "2.0", "id": ' + number + b', "error": ' + error + b"}\n"


def _write(target: int, data: bytes) -> None:
    with contextlib.suppress(
        BrokenPipeError
    ):  # the worker has hung up: the server sees its stdin end
        while data:
            data = data[os.write(target, data) :]


def _end(code: int) -> None:
    _kill_children()
    os._exit(code)


def _kill_children() -> None:
    """Kill everything below us."""
    while children := _children():
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        for child in children:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(child, 0)


def _children() -> list[int]:
    """Ours, and by and by those of the killed ones. A process is its parent's main thread's child."""
    try:
        return list(map(int, Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()))
    except OSError:
        return []  # not Linux


def _die_with_leash() -> None:
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    sys.exit(main())
