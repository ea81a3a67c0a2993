"""Runs a command that cannot outlive its worker: `python subprocess_guard.py WORKER_PID MOST_BYTES COMMAND …`.

    worker ──stdin──▶ command ──stdout──▶ guard ──stdout──▶ worker
                                            └ a line of more than MOST_BYTES becomes a JSON-RPC error

The command is an MCP server or an agent. Standard library only, so that it starts at once and stays small. In
whatever way worker or command end, every process that the command started ends too, also those that left its process
group: orphans become children of the guard (Linux).
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
"""Seconds that a command has to end after SIGTERM, and for its last output."""
CHUNK_BYTES = 1 << 16
TOO_LONG = -32099
"""An error code in the range that JSON-RPC leaves to servers."""
ID = re.compile(rb'"id"\s*:\s*(\d+|"[^"]{1,64}")')


def main() -> int:
    """Run the command with our stdin; its exit code, 128 + n for signal n."""
    worker, most, command = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    killed = 128 + signal.SIGKILL
    # SIGTERM goes to the whole group, the command included; processes that ignore it are killed. SIG_IGN would be
    # inherited.
    signal.signal(signal.SIGTERM, lambda *_: signal.setitimer(signal.ITIMER_REAL, GRACE_S))
    signal.signal(signal.SIGALRM, lambda *_: _end(killed))
    signal.signal(signal.SIGUSR1, lambda *_: _end(killed))
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    _prctl(PR_SET_PDEATHSIG, signal.SIGUSR1)
    if os.getppid() != worker:
        return killed  # the worker died before the line above
    try:
        server = subprocess.Popen(command, stdout=subprocess.PIPE, preexec_fn=_die_with_guard)
    except OSError as error:
        print(f"cannot start {command[0]}: {error}", file=sys.stderr)
        return 127
    assert server.stdout is not None
    ends = (server.stdout.fileno(), sys.stdout.fileno())
    # In a thread: processes that the server started may keep its stdout open after its end.
    passing = threading.Thread(target=pass_on, args=(*ends, most), daemon=True)
    passing.start()
    code = server.wait()
    _kill_children()
    passing.join(GRACE_S)
    return code if code >= 0 else 128 - code


def pass_on(source: int, target: int, most: int) -> None:
    """Copy lines; one with more than `most` bytes becomes an error that answers the same request."""
    line, size = bytearray(), 0
    while chunk := os.read(source, CHUNK_BYTES):
        for part in chunk.splitlines(keepends=True):
            size += len(part)
            # The beginning of a line that is too long is kept, for its id.
            line += part if size <= most else part[: max(0, CHUNK_BYTES - len(line))]
            if part.endswith(b"\n"):
                _write(target, bytes(line) if size <= most else _too_long(bytes(line), size, most))
                line, size = bytearray(), 0


def _too_long(line: bytes, size: int, most: int) -> bytes:
    found = ID.search(line[:CHUNK_BYTES]) or ID.search(line[-CHUNK_BYTES:])
    problem = f"the answer has {size} bytes, more than {most}"
    error = json.dumps({"code": TOO_LONG, "message": problem}).encode()
    number = found[1] if found else b"null"
    return b'{"jsonrpc": "2.0", "id": ' + number + b', "error": ' + error + b"}\n"


def _write(target: int, data: bytes) -> None:
    with contextlib.suppress(
        BrokenPipeError
    ):  # the worker has closed the pipe: the command sees the end of its stdin
        while data:
            data = data[os.write(target, data) :]


def _end(code: int) -> None:
    _kill_children()
    os._exit(code)


def _kill_children() -> None:
    """Kill all descendants."""
    while children := _children():
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        for child in children:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(child, 0)


def _children() -> list[int]:
    """Our children; those of killed processes become ours. Children belong to the parent's main thread."""
    try:
        return list(map(int, Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()))
    except OSError:
        return []  # not Linux


def _die_with_guard() -> None:
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    sys.exit(main())
