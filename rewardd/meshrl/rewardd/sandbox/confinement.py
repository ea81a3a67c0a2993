"""Runs in a scoring process before any foreign code: drops every right that scoring does not need.

The order matters. Linux counts processes per user of a user namespace, so the user and the namespace are set first.
The system call filter is set last, because it refuses calls that the earlier steps need.
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
"""Foreign code gets less CPU time than the mesh's own processes."""
level = "off"
"""Isolation of this process: `off`, `weak` or `strict`. The reward `code` reads it before it runs a program."""


def confine(confinement: Json, limits: Json) -> None:
    """Apply `confinement` (of a `Launch`) and `limits` (the fields of Limits) to this process; cannot be undone.

    Raises:
        OSError: the kernel refuses the system call filter; the process must end.
    """
    global level
    level = confinement["level"]
    if level != "off":
        with contextlib.suppress(OSError):  # first to go when memory runs out
            Path("/proc/self/oom_score_adj").write_text("1000")
        os.nice(NICE)
        if confinement["user"] is not None:
            os.setgroups([])
            os.setresgid(*[confinement["user"]] * 3)
            os.setresuid(*[confinement["user"]] * 3)
            if level == "weak":  # changing the user has reset it
                ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        _own_namespaces(level)
    _apply(limits)
    sys.path += confinement["search"]  # at the end: nothing there replaces a module of ours
    if level != "off":
        ctypes.CDLL(None).prctl(seccomp.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        ctypes.CDLL(None).prctl(
            PR_SET_DUMPABLE, 0, 0, 0, 0
        )  # no other process of this user reads its memory
        if level == "weak" and landlock.version():
            landlock.restrict(confinement["readable"], confinement["writable"])
        _filter()


def _own_namespaces(level: str) -> None:
    """A user namespace, so that limits count this sandbox alone; at level `weak` also those that need no mount."""
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
