"""Restricts files and signals of this process (Landlock); needs no privilege.

https://docs.kernel.org/userspace-api/landlock.html; Linux 5.13 and later.
"""

from __future__ import annotations

import ctypes
import os
import stat
import struct
import sys
from collections.abc import Sequence

CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
VERSION, PATH_BENEATH = 1, 1
EXECUTE, WRITE_FILE, READ_FILE, READ_DIR, TRUNCATE = 1 << 0, 1 << 1, 1 << 2, 1 << 3, 1 << 14
READ = EXECUTE | READ_FILE | READ_DIR
IOCTL_DEVICE = 1 << 15
OF_A_FILE = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE | IOCTL_DEVICE
RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16, 6: 16}
"""ABI version to the number of rights over files that it knows."""
BIND_TCP, CONNECT_TCP = 1 << 0, 1 << 1
ABSTRACT_UNIX_SOCKETS, SIGNALS = 1 << 0, 1 << 1


def version() -> int:
    """The kernel's ABI; 0 where there is none."""
    if sys.platform != "linux":
        return 0
    return max(0, int(ctypes.CDLL(None).syscall(CREATE_RULESET, None, 0, VERSION)))


def restrict(readable: Sequence[str], writable: Sequence[str]) -> None:
    """Allow only files in these folders (or these files), and signals to itself, from now on. Raises OSError."""
    abi = version()
    all_rights = _file_rights(abi)
    attribute = struct.pack("Q", all_rights)
    attribute += struct.pack("Q", BIND_TCP | CONNECT_TCP) if abi >= 4 else b""
    attribute += struct.pack("Q", ABSTRACT_UNIX_SOCKETS | SIGNALS) if abi >= 6 else b""
    ruleset = _call(CREATE_RULESET, attribute, len(attribute), 0)
    try:
        for paths, rights in ((readable, READ), (writable, all_rights)):
            for path in paths:
                _add(ruleset, path, rights)
        _call(RESTRICT_SELF, ruleset, 0)
    finally:
        os.close(ruleset)


def _file_rights(abi: int) -> int:
    return int((1 << RIGHTS[min(abi, max(RIGHTS))]) - 1)


def _add(ruleset: int, path: str, rights: int) -> None:
    handle = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        if not stat.S_ISDIR(os.fstat(handle).st_mode):
            rights &= OF_A_FILE & _file_rights(version())
        _call(ADD_RULE, ruleset, PATH_BENEATH, struct.pack("=Qi", rights, handle), 0)
    finally:
        os.close(handle)


def _call(number: int, *arguments: int | bytes) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    result = int(libc.syscall(number, *arguments))
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result
