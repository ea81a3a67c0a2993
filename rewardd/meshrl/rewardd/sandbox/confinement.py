"""Inside a scoring process, before any foreign code runs: give up what is not needed, then lock the door.

The order matters. Limits on processes are counted per user of a user namespace, so the user and the namespace come
first; the filter comes last, because it refuses what the steps before it need.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import resource
import signal
import struct
import sys
from pathlib import Path

from meshrl.contract.types import Json
from meshrl.rewardd.sandbox import landlock, seccomp

PR_SET_PDEATHSIG, PR_SET_DUMPABLE = 1, 4
CLONE_NEWUSER, CLONE_NEWNET, CLONE_NEWIPC, CLONE_NEWUTS = (
    0x10000000,
    0x40000000,
    0x08000000,
    0x04000000,
)
CAPABILITY_VERSION_3 = 0x20080522
NICE = 5
"""Foreign code yields to the mesh's own processes."""
level = "off"
"""How this process is shut in: `off`, `weak` or `strict`. What runs a policy's programs asks before it does."""


def confine(how: Json, limits: Json) -> None:
    """Apply `how` (of a `Launch`) and `limits` (the fields of Limits) to this process, for good.

    Raises:
        OSError: the kernel refuses the system call filter; the process must not go on.
    """
    global level
    level = how["level"]
    if level != "off":
        with contextlib.suppress(OSError):  # first to go when memory runs out
            Path("/proc/self/oom_score_adj").write_text("1000")
        os.nice(NICE)
        if how["user"] is not None:
            os.setgroups([])
            os.setresgid(*[how["user"]] * 3)
            os.setresuid(*[how["user"]] * 3)
            if level == "weak":  # becoming another has undone it
                ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        _own_namespaces(level)
    _apply(limits)
    sys.path += how["search"]  # last: nothing there takes the place of a module of ours
    if level != "off":
        ctypes.CDLL(None).prctl(seccomp.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        ctypes.CDLL(None).prctl(
            PR_SET_DUMPABLE, 0, 0, 0, 0
        )  # no other process of this user reads its memory
        if level == "weak" and landlock.version():
            landlock.restrict(how["readable"], how["writable"])
        _filter()


def _own_namespaces(level: str) -> None:
    """A user namespace, so that limits count this cell alone; in a weak cell the others that need no mount."""
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    spaces = CLONE_NEWUSER
    if level == "weak":
        spaces |= CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS
    libc.unshare(spaces)  # refused inside bubblewrap's own user namespace, which is one already
    header, nothing = struct.pack("II", CAPABILITY_VERSION_3, 0), bytes(24)
    libc.capset(ctypes.c_char_p(header), ctypes.c_char_p(nothing))


def _apply(limits: Json) -> None:
    kinds = {
        resource.RLIMIT_AS: limits["memory_bytes"],
        resource.RLIMIT_NPROC: limits["processes"],
        resource.RLIMIT_NOFILE: limits["open_files"],
        resource.RLIMIT_FSIZE: limits["tmp_bytes"],
        resource.RLIMIT_CORE: 0,
    }
    for kind, value in kinds.items():
        if value is not None:
            resource.setrlimit(kind, (value, value))


def _filter() -> None:
    alone = os.getpid() if level == "weak" else None
    if seccomp.available() and (filter_ := seccomp.program(platform.machine(), alone_pid=alone)):
        seccomp.install(filter_)
