"""Loaded at the start of every Python process of a real server in a test: none imports the server again.

Each process of vLLM and SGLang would, for 17 s of processor time: they start their children afresh. Here children are
forks of their parent, and the first process, where SERVER_FORKS names the socket of `zygote.py`, has that one fork
the server, and stands for it: with its output, its signals and its end. Killed, it takes the whole server along.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import traceback
from multiprocessing import context
from pathlib import Path
from typing import NoReturn

SWITCH = "SERVER_FORKS"


def stand_for_a_fork(path: str) -> NoReturn:
    """Have the command of this process run by a fork of the zygote, and end as that ends."""
    code = 1
    try:
        code = ended(path)
    except BaseException:  # Python would continue with the command
        traceback.print_exc()
    if code < 0:
        if code != -signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def ended(path: str) -> int:
    """The exit code of the fork, -n for signal n."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as zygote:
        zygote.connect(path)
        command = sys.orig_argv[sys.orig_argv.index("-m") + 1 :]
        request = {"command": command, "env": dict(os.environ), "cwd": str(Path.cwd())}
        socket.send_fds(zygote, [json.dumps(request).encode()], [0, 1, 2])
        pid = int(zygote.recv(64))

        def pass_on(number: int, frame: object) -> None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, pass_on)
        return os.waitstatus_to_exitcode(int(zygote.recv(64)))


context._concrete_contexts["spawn"] = context._concrete_contexts["fork"]  # type: ignore[attr-defined]
if SWITCH in os.environ and "-m" in sys.orig_argv:
    stand_for_a_fork(os.environ.pop(SWITCH))
