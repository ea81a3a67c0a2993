"""Builds and installs a system call filter (classic BPF): the calls that a scoring process may not make.

Namespaces isolate; this filter is a second layer. It lists what is refused, not what is allowed, so that numpy, sympy
and other packages run unchanged. Refused are: networks, mounts, namespaces, other processes' memory, signals to the
owner of a file, memory that no limit counts, and the parts of the kernel where holes are found most often. They fail
with EPERM; a call that is younger than these tables fails as on a kernel that lacks it.

    seccomp(2); struct seccomp_data {int nr; u32 arch; u64 instruction_pointer; u64 args[6];}
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
from collections.abc import Mapping, Sequence

ALLOW, KILL, REFUSE = 0x7FFF0000, 0x80000000, 0x00050000
LOAD, JUMP_EQUAL, JUMP_GREATER_EQUAL, JUMP_SET, AND, RETURN = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06
NUMBER, ARCHITECTURE, ARGUMENT_0 = 0, 4, 16
"""Argument n lies at ARGUMENT_0 + 8 n, its lower half first."""
YOUNGEST = 469
"""The last call that the tables below know; numbers from 424 on are the same on both machines."""
X32 = 0x40000000
"""The x32 calls of x86-64 have numbers of their own, from here on."""
CLONE_NAMESPACES = 0x7E020080
CLONE_THREAD = 0x00010000
PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 38, 22, 2

ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""Machine to its column in the tables below and its AUDIT_ARCH."""

SOCKET, TKILL = (41, 198), (200, 130)
ALL_PROCESSES = 0xFFFFFFFF
"""-1, in place of a pid."""
# Numbers from the kernel's asm/unistd_64.h and asm-generic/unistd.h; None where an architecture lacks the call.
REFUSED: dict[str, tuple[int | None, int | None]] = {
    # the network: the sandbox has none, and so the call fails at once
    "socket": SOCKET,
    "connect": (42, 203),
    "bind": (49, 200),
    "listen": (50, 201),
    "accept": (43, 202),
    "accept4": (288, 242),
    "setsockopt": (54, 208),  # SO_SNDBUF: memory that no limit counts
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
    "open_tree_attr": (467, 467),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    # other processes
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "kcmp": (312, 272),
    "pidfd_getfd": (438, 438),
    "process_mrelease": (448, 448),
    "move_pages": (279, 239),
    "migrate_pages": (256, 238),
    # memory and queues that no limit of ours counts
    "shmget": (29, 194),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
    "inotify_init": (253, None),  # aarch64 has inotify_init1 only
    "inotify_init1": (294, 26),
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
    "modify_ldt": (154, None),
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
OF_AGENTS = frozenset(
    {
        *("socket", "connect", "bind", "listen", "accept", "accept4", "setsockopt", "setsid"),
        *("shmget", "memfd_create", "msgget", "semget", "mq_open"),
        *("inotify_init", "inotify_init1"),
    }
)
"""Allowed in a box with a network of its own, whose processes are an agent's."""
FAMILIES = (1, 2, 10, 16)
"""Sockets of an agent: AF_UNIX, AF_INET, AF_INET6, AF_NETLINK. AF_VSOCK would reach the host of a virtual machine."""
CLONE, CLONE3 = (56, 220), (435, 435)
FCNTL, IOCTL, SOCKETPAIR, SENDTO = (72, 25), (16, 29), (53, 199), (44, 206)
FCNTL_REFUSED = {
    8: errno.EPERM,  # F_SETOWN: the kernel sends signals to the owner of a file
    10: errno.EPERM,  # F_SETSIG
    15: errno.EPERM,  # F_SETOWN_EX
    1024: errno.EPERM,  # F_SETLEASE
    1026: errno.EPERM,  # F_NOTIFY
    1031: errno.EPERM,  # F_SETPIPE_SZ
    6: errno.ENOLCK,  # F_SETLK: each lock takes memory that no limit counts
    7: errno.ENOLCK,  # F_SETLKW
    37: errno.ENOLCK,  # F_OFD_SETLK
    38: errno.ENOLCK,  # F_OFD_SETLKW
}
IOCTL_REFUSED = {
    number: errno.EPERM for number in (0x8901, 0x8902, 0x5412, 0x541C)
}  # FIOSETOWN, SIOCSPGRP, TIOCSTI, TIOCLINUX
AF_UNIX, SOCK_STREAM, SOCK_TYPES = 1, 1, 0xF
ALONE: dict[str, tuple[int | None, int | None]] = {
    # starting and signalling processes
    "fork": (57, None),
    "vfork": (58, None),
    "execve": (59, 221),
    "execveat": (322, 281),
    "tkill": TKILL,
    "pidfd_open": (434, 434),
    "pidfd_send_signal": (424, 424),
    "setpriority": (141, 140),
    "ioprio_set": (251, 30),
    # what a file says of itself: Landlock does not cover it
    "chmod": (90, None),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "chown": (92, None),
    "fchown": (93, 55),
    "lchown": (94, None),
    "fchownat": (260, 54),
    "utime": (132, None),
    "utimes": (235, None),
    "futimesat": (261, None),
    "utimensat": (280, 88),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "setxattrat": (463, 463),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
    "fremovexattr": (199, 16),
    "removexattrat": (466, 466),
    "file_setattr": (469, 469),
    "truncate": (76, 45),  # Landlock knows it from its third version on
}
"""Refused too where no namespace hides other processes and their files."""
OWN_PID: dict[str, tuple[int, int]] = {
    "kill": (62, 129),
    "tgkill": (234, 131),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
}
OWN_PID_OR_0: dict[str, tuple[int, int]] = {
    "prlimit64": (302, 261),
    "sched_setaffinity": (203, 122),
    "sched_setscheduler": (144, 119),
    "sched_setparam": (142, 118),
    "sched_setattr": (314, 274),
}
"""Allowed in that case only with its own pid (or 0, which means itself) as the first argument."""
OPEN, OPENAT, OPENAT2 = (2, None), (257, 56), (437, 437)
CREATES = 0x400040
"""O_CREAT and O_TMPFILE."""
NAMES: dict[str, tuple[int | None, int | None]] = {
    "creat": (85, None),
    "mkdir": (83, None),
    "mkdirat": (258, 34),
    "mknod": (133, None),
    "mknodat": (259, 33),
    "symlink": (88, None),
    "symlinkat": (266, 36),
    "link": (86, None),
    "linkat": (265, 37),
    "rename": (82, None),
    "renameat": (264, 38),
    "renameat2": (316, 276),
}
"""Refused too where no new file may be made."""


def program(
    machine: str,
    *,
    alone_pid: int | None = None,
    creates_files: bool = True,
    agent_beside: int | None = None,
) -> bytes | None:
    """The filter for a machine (`platform.machine()`); None where the table has no column for it.

    With `agent_beside` the calls OF_AGENTS are allowed, locks and sockets of most kinds too, but no signal to the
    process of that pid. With `alone_pid` the process of that pid may neither start nor signal any other, nor change
    a file's owner, mode or times; without `creates_files` it makes no file.
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
    code += [_op(JUMP_GREATER_EQUAL, YOUNGEST + 1, 0, 1), _refuse(errno.ENOSYS)]
    refused: dict[str, tuple[int | None, int | None]] = dict(REFUSED)
    refused |= {} if alone_pid is None else ALONE
    refused |= {} if creates_files else NAMES
    if agent_beside is not None:
        refused = {name: numbers for name, numbers in refused.items() if name not in OF_AGENTS}
    for numbers in refused.values():
        if (number := numbers[column]) is not None:
            code += [_op(JUMP_EQUAL, number, 0, 1), _refuse()]
    # Its flags lie in memory, out of a filter's reach: the C library falls back to clone.
    code += [_op(JUMP_EQUAL, CLONE3[column], 0, 1), _refuse(errno.ENOSYS)]
    code += _call(CLONE[column], _clone(threads_only=alone_pid is not None))
    code += _call(IOCTL[column], _argument(1, IOCTL_REFUSED))
    if agent_beside is not None:
        owners = {number: why for number, why in FCNTL_REFUSED.items() if why != errno.ENOLCK}
        code += _call(FCNTL[column], _argument(1, owners))
        code += _call(SOCKET[column], _only(0, FAMILIES))
        for numbers_ in (*OWN_PID.values(), TKILL):
            everybody = {agent_beside: errno.EPERM, ALL_PROCESSES: errno.EPERM}
            code += _call(numbers_[column], _argument(0, everybody))
        for name in ("pidfd_open", "pidfd_send_signal"):  # as on a kernel that lacks them
            code += [_op(JUMP_EQUAL, ALONE[name][column] or 0, 0, 1), _refuse(errno.ENOSYS)]
    else:
        code += _call(FCNTL[column], _argument(1, FCNTL_REFUSED))
        code += _call(SOCKETPAIR[column], _stream_pair())
        code += _call(SENDTO[column], _no_address())
    if alone_pid is not None:
        for numbers_ in OWN_PID.values():
            code += _call(numbers_[column], _only(0, [alone_pid]))
        for numbers_ in OWN_PID_OR_0.values():
            code += _call(numbers_[column], _only(0, [alone_pid, 0]))
    if not creates_files:
        code += [_op(JUMP_EQUAL, OPENAT2[column], 0, 1), _refuse(errno.ENOSYS)]
        for opening, flags in ((OPEN, 1), (OPENAT, 2)):
            if (number := opening[column]) is not None:
                code += _call(number, _without(flags, CREATES))
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


def _refuse(number: int = errno.EPERM) -> bytes:
    return _op(RETURN, REFUSE | number)


def _call(number: int, body: list[bytes]) -> list[bytes]:
    """`body`, which ends the program, for this call only."""
    return [_op(JUMP_EQUAL, number, 0, len(body)), *body]


def _load(argument: int, *, upper: bool = False) -> bytes:
    return _op(LOAD, ARGUMENT_0 + 8 * argument + 4 * upper)


def _clone(*, threads_only: bool) -> list[bytes]:
    """No new namespaces; with `threads_only` no new processes either."""
    body = _without(0, CLONE_NAMESPACES)
    if threads_only:
        body[-1:] = [_op(JUMP_SET, CLONE_THREAD, 1, 0), _refuse(), _op(RETURN, ALLOW)]
    return body


def _without(argument: int, bits: int) -> list[bytes]:
    """Allowed where the argument has none of these bits."""
    return [_load(argument), _op(JUMP_SET, bits, 0, 1), _refuse(), _op(RETURN, ALLOW)]


def _argument(argument: int, refused: Mapping[int, int]) -> list[bytes]:
    """Refused with these values of the argument, each with its error."""
    body = [_load(argument)]
    for value, error in refused.items():
        body += [_op(JUMP_EQUAL, value, 0, 1), _refuse(error)]
    return [*body, _op(RETURN, ALLOW)]


def _only(argument: int, values: Sequence[int]) -> list[bytes]:
    """Allowed with one of these values of the argument only."""
    body = [_load(argument)]
    for index, value in enumerate(values):
        body.append(_op(JUMP_EQUAL, value, len(values) - index, 0))
    return [*body, _refuse(), _op(RETURN, ALLOW)]


def _stream_pair() -> list[bytes]:
    """A pair of connected streams: a datagram socket could send to a name that others listen at."""
    return [
        _load(0),
        _op(JUMP_EQUAL, AF_UNIX, 0, 3),
        _load(1),
        _op(AND, SOCK_TYPES),
        _op(JUMP_EQUAL, SOCK_STREAM, 1, 0),
        _refuse(),
        _op(RETURN, ALLOW),
    ]


def _no_address() -> list[bytes]:
    """Allow sending only to the other end of a pair: the fifth argument is a null pointer."""
    return [
        _load(4),
        _op(JUMP_EQUAL, 0, 0, 2),
        _load(4, upper=True),
        _op(JUMP_EQUAL, 0, 1, 0),
        _refuse(),
        _op(RETURN, ALLOW),
    ]
