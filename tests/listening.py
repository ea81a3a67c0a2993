"""The sockets at which a process listens, read from /proc."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
from collections.abc import Iterator
from pathlib import Path

LISTENING = "0A"
ACCEPTS = 0x10000
"""In the flags of a unix socket that listens."""


def addresses(pid: int | None = None) -> set[str]:
    """The IP addresses at which the process `pid` listens for TCP; this process without it."""
    return {address for address, _ in sockets(pid)}


def sockets(pid: int | None = None) -> set[tuple[str, int]]:
    """(address, port) of the TCP sockets at which the process `pid` listens."""
    process = Path("/proc") / str(pid or os.getpid())
    inodes = set(_inodes(process))
    found = set()
    for family in ("tcp", "tcp6"):
        for line in (process / "net" / family).read_text().splitlines()[1:]:
            _, local, _, state, _, _, _, _, _, inode, *_ = line.split()
            if state == LISTENING and inode in inodes:
                address, _, port = local.partition(":")
                found.add((_address(address), int(port, 16)))
    return found


def unix_sockets(pid: int | None = None) -> set[str]:
    """Names, abstract ones included, of the unix sockets at which the process `pid` listens."""
    process = Path("/proc") / str(pid or os.getpid())
    inodes = set(_inodes(process))
    found = set()
    for line in (process / "net" / "unix").read_text().splitlines()[1:]:
        _, _, _, flags, _, _, inode, *name = line.split(maxsplit=7)
        if int(flags, 16) & ACCEPTS and inode in inodes:
            found.add("".join(name))
    return found


def reachable_sockets(pid: int) -> set[tuple[str, int]]:
    """Sockets reachable from other machines, of the process `pid` and its descendants, as far as they still run."""
    found: set[tuple[str, int]] = set()
    for each in {pid, *descendants(pid)}:
        with contextlib.suppress(OSError):
            found |= sockets(each)
    return {each for each in found if not ipaddress.ip_address(each[0]).is_loopback}


def descendants(pid: int) -> set[int]:
    """The processes that `pid` started, directly or not."""
    found: set[int] = set()
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, task.read_text().split()):
                found |= {child} | descendants(child)
    return found


def _inodes(process: Path) -> Iterator[str]:
    for descriptor in (process / "fd").iterdir():
        try:
            target = str(descriptor.readlink())
        except OSError:
            continue
        if match := re.fullmatch(r"socket:\[(\d+)\]", target):
            yield match[1]


def _address(text: str) -> str:
    """Little-endian words, as the kernel prints them."""
    words = [bytes.fromhex(text[i : i + 8])[::-1] for i in range(0, len(text), 8)]
    address = ipaddress.ip_address(b"".join(words))
    mapped = getattr(address, "ipv4_mapped", None)
    return str(mapped or address)
