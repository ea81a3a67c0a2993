"""Builds and installs a system call filter (classic BPF): the calls that a scoring process may not make.

Namespaces isolate; this filter is a second layer. It lists what is refused, not what is allowed, so that numpy, sympy
and other packages run unchanged. Refused are: networks, mounts, namespaces, other processes' memory, memory that
RLIMIT_AS does not count, and the parts of the kernel where holes are found most often. They fail with EPERM.

    seccomp(2); struct seccomp_data {int nr; u32 arch; u64 instruction_pointer; u64 args[6];}
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
from collections.abc import Sequence

ALLOW, KILL, REFUSE = 0x7FFF0000, 0x80000000, 0x00050000
LOAD, JUMP_EQUAL, JUMP_GREATER_EQUAL, JUMP_SET, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
NUMBER, ARCHITECTURE, ARGUMENT_0 = 0, 4, 16
X32 = 0x40000000
"""The x32 calls of x86-64 have numbers of their own, from here on."""
CLONE_NAMESPACES = 0x7E020080
CLONE_THREAD = 0x00010000
PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 38, 22, 2

ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""Machine to its column in the tables below and its AUDIT_ARCH."""

# Numbers from the kernel's asm/unistd_64.h and asm-generic/unistd.h; None where an architecture lacks the call.
REFUSED: dict[str, tuple[int | None, int]] = {
    # the network: the sandbox has none, and so the call fails at once
    "socket": (41, 198),
    # namespaces and mounts
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "move_mount": (429, 429),
    "open_tree": (428, 428),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    # other processes
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "kcmp": (312, 272),
    "pidfd_getfd": (438, 438),
    # memory and queues that no limit of ours counts
    "shmget": (29, 194),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
    # Linux shares the processors among sessions: no second session
    "setsid": (112, 157),
    # the kernel itself
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "fanotify_init": (300, 262),
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "clock_adjtime": (305, 266),
    "adjtimex": (159, 171),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "syslog": (103, 116),
}
CLONE, CLONE3 = (56, 220), (435, 435)
ALONE: dict[str, tuple[int | None, int]] = {
    "fork": (57, None),  # type: ignore[dict-item]  # aarch64 has clone only
    "vfork": (58, None),  # type: ignore[dict-item]
    "execve": (59, 221),
    "execveat": (322, 281),
    "tkill": (200, 130),
    "pidfd_send_signal": (424, 424),
}
"""Refused too where no process namespace hides other processes: starting and signalling them."""
OWN_PID: dict[str, tuple[int, int]] = {
    "kill": (62, 129),
    "tgkill": (234, 131),
    "prlimit64": (302, 261),
}
"""Allowed in that case only with its own pid (or 0, for prlimit64) as the first argument."""


def program(machine: str, *, alone_pid: int | None = None) -> bytes | None:
    """The filter for a machine (`platform.machine()`); None where the table has no column for it.

    With `alone_pid` the process of that pid may neither start nor signal any other.
    """
    if machine not in ARCHITECTURES:
        return None
    column, architecture = ARCHITECTURES[machine]
    code = [
        _op(LOAD, ARCHITECTURE),
        _op(JUMP_EQUAL, architecture, 1, 0),
        _op(RETURN, KILL),
        _op(LOAD, NUMBER),
    ]
    if machine == "x86_64":
        code += [_op(JUMP_GREATER_EQUAL, X32, 0, 1), _op(RETURN, KILL)]
    refused = dict(REFUSED) if alone_pid is None else REFUSED | ALONE
    for numbers in refused.values():
        if (number := numbers[column]) is not None:
            code += [_op(JUMP_EQUAL, number, 0, 1), _op(RETURN, REFUSE | errno.EPERM)]
    # Its flags lie in memory, out of a filter's reach: the C library falls back to clone.
    code += [_op(JUMP_EQUAL, CLONE3[column], 0, 1), _op(RETURN, REFUSE | errno.ENOSYS)]
    code += _clone(CLONE[column], threads_only=alone_pid is not None)
    if alone_pid is not None:
        for name, numbers_ in OWN_PID.items():
            code += _own(numbers_[column], [alone_pid, 0] if name == "prlimit64" else [alone_pid])
    return b"".join([*code, _op(RETURN, ALLOW)])


def install(filter_: bytes) -> None:
    """Apply the filter to the calling thread and what it starts; cannot be undone. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    buffer = ctypes.create_string_buffer(filter_, len(filter_))
    # struct sock_fprog {unsigned short len; struct sock_filter *filter;}
    fprog = struct.pack("HP", len(filter_) // 8, ctypes.addressof(buffer))
    for arguments in (
        (PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0),
        (PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.c_char_p(fprog), 0, 0),
    ):
        if libc.prctl(*arguments) != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def available() -> bool:
    """True where a filter can be installed: a known machine and a kernel that has them."""
    return platform.machine() in ARCHITECTURES and os.path.exists("/proc/sys/kernel/seccomp")  # noqa: PTH110


def _op(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)


def _clone(number: int, *, threads_only: bool) -> list[bytes]:
    """No new namespaces; with `threads_only` no new processes either. Ends the program for this call."""
    refuse, allow = _op(RETURN, REFUSE | errno.EPERM), _op(RETURN, ALLOW)
    body = [_op(LOAD, ARGUMENT_0), _op(JUMP_SET, CLONE_NAMESPACES, 0, 1), refuse]
    if threads_only:
        body += [_op(JUMP_SET, CLONE_THREAD, 1, 0), refuse]
    body.append(allow)
    return [_op(JUMP_EQUAL, number, 0, len(body)), *body]


def _own(number: int, pids: Sequence[int]) -> list[bytes]:
    """This call, with one of these as its first argument only. Ends the program for this call."""
    body = [_op(LOAD, ARGUMENT_0)]
    for index, pid in enumerate(pids):
        body.append(_op(JUMP_EQUAL, pid, len(pids) - index, 0))
    body += [_op(RETURN, REFUSE | errno.EPERM), _op(RETURN, ALLOW)]
    return [_op(JUMP_EQUAL, number, 0, len(body)), *body]
