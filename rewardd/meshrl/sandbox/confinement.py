"""Runs in a scoring process before any foreign code: drops every right that scoring does not need.

The order matters. Linux counts processes per user of a user namespace, so the user and the namespace are set first.
The system call filter is set last, because it refuses calls that the earlier steps need.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import re
import resource
import struct
import sys
from pathlib import Path

from meshrl.common.process_guard import die_with_parent
from meshrl.contract.types import Json
from meshrl.sandbox import landlock, seccomp

PR_SET_DUMPABLE = 4
CLONE_NEWUSER, CLONE_NEWNS, CLONE_NEWNET, CLONE_NEWIPC, CLONE_NEWUTS = (
    0x10000000,
    0x00020000,
    0x40000000,
    0x08000000,
    0x04000000,
)
MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_PRIVATE = 1 << 1, 1 << 2, 1 << 12, 1 << 14, 1 << 18
BYTES_A_FILE = 16 << 10
"""Bytes of the private /tmp for each file in it: an empty file takes 1 KiB of the kernel's memory."""
LEAST_FILES = 256
CAPABILITY_VERSION_3 = 0x20080522
NICE = 5
"""Foreign code gets less CPU time than the mesh's own processes."""
QUEUED_SIGNALS = 256
level = "off"
"""Isolation of this process: `off`, `weak` or `strict`. The reward `code` reads it before it runs a program."""
deadline_s = float("inf")
"""Seconds that one sample may take; the reward `code` divides them among its tests."""


def confine(confinement: Json, limits: Json) -> None:
    """Apply `confinement` (of a `Launch`) and `limits` (the fields of Limits) to this process; cannot be undone.

    Raises:
        OSError: the kernel refuses the system call filter; the process must end.
    """
    global level, deadline_s
    level, deadline_s = confinement["level"], float(limits["deadline_s"])
    libc = ctypes.CDLL(None, use_errno=True)
    if level != "off":
        with contextlib.suppress(OSError):  # first to go when memory runs out
            Path("/proc/self/oom_score_adj").write_text("1000")
        os.nice(NICE)
        user = confinement["user"]
        if user is not None:
            os.setgroups([])
            os.setresgid(user, user, user)
            os.setresuid(user, user, user)
        _own_namespaces(libc, limits["tmp_bytes"])
        if level == "weak":  # changing the user has reset it
            die_with_parent(os.getppid())
    _apply(limits)
    if level != "off":
        libc.prctl(seccomp.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        # no other process of this user reads its memory
        libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
        if level == "weak" and landlock.version():
            landlock.restrict(confinement["readable"], confinement["writable"])
        _filter()


def _own_namespaces(libc: ctypes.CDLL, tmp_bytes: int | None) -> None:
    """Enter a user namespace, so that limits count this sandbox alone, and its own /tmp; no rights remain."""
    if sys.platform != "linux":
        return
    user, group = os.geteuid(), os.getegid()
    spaces = CLONE_NEWUSER | CLONE_NEWNS
    if level == "weak":
        spaces |= CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS
    if libc.unshare(spaces) == 0:
        libc.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)  # it may write its own maps
        with contextlib.suppress(OSError):
            Path("/proc/self/setgroups").write_text("deny")
            Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
            Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
            _private_tmp(libc, os.environ["TMPDIR"], tmp_bytes)
    header, nothing = struct.pack("II", CAPABILITY_VERSION_3, 0), bytes(24)
    libc.capset(ctypes.c_char_p(header), ctypes.c_char_p(nothing))


def _private_tmp(libc: ctypes.CDLL, folder: str, tmp_bytes: int | None) -> None:
    """Mount a folder in memory with limits of size and files; at level `strict` it is /dev/shm as well.

    Where the kernel refuses, the folder that is there stays: it has a size, and no limit of files.
    """
    size = tmp_bytes or 1 << 30
    options = f"size={size},nr_inodes={max(LEAST_FILES, size // BYTES_A_FILE)},mode=1777".encode()
    libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None)
    made_at = "/dev/shm" if level == "strict" else folder
    if libc.mount(b"tmpfs", made_at.encode(), b"tmpfs", MS_NOSUID | MS_NODEV, options) != 0:
        return
    if level == "strict":
        for path in _mounts_below(folder):  # Python or the function, in a checkout below /tmp
            copy = Path(made_at + path.removeprefix(folder))
            made = copy if os.path.isdir(path) else copy.parent  # noqa: PTH112
            made.mkdir(parents=True, exist_ok=True)
            if made != copy:
                copy.touch()
            libc.mount(path.encode(), bytes(copy), None, MS_BIND | MS_REC, None)
        libc.mount(made_at.encode(), folder.encode(), None, MS_BIND | MS_REC, None)
    os.chdir(folder)


def _mounts_below(folder: str) -> list[str]:
    """Mount points in `folder`, without those below another one of them."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    octal = re.compile(r"\\([0-7]{3})")
    paths = [octal.sub(lambda code: chr(int(code[1], 8)), line.split()[4]) for line in lines]
    found: list[str] = []
    for path in sorted(set(paths)):
        if path.startswith(folder + "/") and not any(path.startswith(f"{top}/") for top in found):
            found.append(path)
    return found


def _apply(limits: Json) -> None:
    kinds = {
        resource.RLIMIT_AS: limits["memory_bytes"],
        resource.RLIMIT_NPROC: limits["processes"],
        resource.RLIMIT_NOFILE: limits["open_files"],
        resource.RLIMIT_FSIZE: limits["tmp_bytes"],
        resource.RLIMIT_CORE: 0,
    }
    if level != "off":
        kinds |= {resource.RLIMIT_SIGPENDING: QUEUED_SIGNALS, resource.RLIMIT_MSGQUEUE: 0}
    for kind, value in kinds.items():
        if value is not None:
            resource.setrlimit(kind, (value, value))


def _filter() -> None:
    alone = os.getpid() if level == "weak" else None
    if seccomp.available() and (filter_ := seccomp.program(platform.machine(), alone_pid=alone)):
        seccomp.install(filter_)
