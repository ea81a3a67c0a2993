"""Sockets of a worker on the loopback of its boxes: only processes of that box connect.

No port of this machine, no file and no key is needed: the kernel delivers a connection within its network namespace.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys

from meshrl.contract.errors import UnavailableError, UserError
from meshrl.rollout.containers import enter

HELPER = (sys.executable, "-I", "-S", enter.__file__)
START_S = 30.0
"""Seconds in which a box starts, or its loopback answers."""


async def listen_in(pidfd: int, name: str, namespaces: int, *, user: int | None) -> socket.socket:
    """A socket that listens on the loopback of a box.

    Args:
        pidfd: Of a process of the box; it is closed.
        name: Of the box.
        namespaces: Those of the box that are entered, as setns(2) has them.
        user: The user that a worker of root becomes first.

    Raises:
        UserError: this process has no right to them.
        UnavailableError: the box has ended.
    """
    request = json.dumps({"pidfd": pidfd, "user": user, "namespaces": namespaces})
    try:
        return await asyncio.to_thread(_listen, pidfd, request, name)
    finally:
        os.close(pidfd)


def _listen(pidfd: int, request: str, name: str) -> socket.socket:
    """Wait for a process that enters the box, some 50 ms."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        try:
            done = subprocess.run(
                [*HELPER, "listen", str(os.getpid()), request],
                stdin=theirs.fileno(),
                capture_output=True,
                text=True,
                env={"PATH": os.defpath},
                cwd="/",
                pass_fds=(pidfd,),
                timeout=START_S,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise UnavailableError(f"the box {name} does not answer") from error
        if done.returncode != 0:
            kind = UserError if "not permitted" in done.stderr else UnavailableError
            raise kind(f"the loopback of the box {name} cannot be entered: {done.stderr.strip()}")
        listener = socket.recv_fds(ours, 1, 1)[1][0]
    return socket.socket(fileno=listener)
