"""A disk whose power can be cut: ext4 on a loop device, shut down as a crash leaves it (FS_IOC_SHUTDOWN, no flush).

What was fsynced is there after the next mount; what was only in the page cache is gone, but for what the kernel
happened to write back, which `write_back` does for a range. This is what xfstests does.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import struct
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SHUTDOWN = 0x8004587D
"""_IOR('X', 125, __u32)"""
WITHOUT_FLUSH = struct.pack("I", 2)

WRITE_AND_WAIT = 7
"""SYNC_FILE_RANGE_WAIT_BEFORE | _WRITE | _WAIT_AFTER"""


def write_back(path: Path, nbytes: int) -> None:
    """The first bytes of a file reach the disk, as they may at any time; the rest of it does not."""
    libc = ctypes.CDLL(None, use_errno=True)
    file = os.open(path, os.O_RDWR)
    try:
        offset, length = ctypes.c_int64(0), ctypes.c_int64(nbytes)
        if libc.sync_file_range(file, offset, length, WRITE_AND_WAIT) != 0:
            raise OSError(ctypes.get_errno(), "sync_file_range")
    finally:
        os.close(file)


def call(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=60)


class Disk:
    def __init__(self, folder: Path) -> None:
        self._image = folder / "image"
        self.mount_point = folder / "disk"
        self.mount_point.mkdir()
        with self._image.open("wb") as image:
            image.truncate(256 << 20)
        call("mkfs.ext4", "-q", "-F", str(self._image))

    def mount(self) -> None:
        call("mount", "-o", "loop", str(self._image), str(self.mount_point))

    def unmount(self) -> None:
        call("umount", str(self.mount_point))

    def cut_power(self) -> None:
        """Nothing reaches the disk from here on; the journal is not flushed."""
        folder = os.open(self.mount_point, os.O_RDONLY)
        try:
            fcntl.ioctl(folder, SHUTDOWN, WITHOUT_FLUSH)
        finally:
            os.close(folder)


@contextmanager
def mounted(folder: Path) -> Iterator[Disk]:
    """Raises OSError or CalledProcessError where this is not allowed (no root, no loop devices)."""
    disk = Disk(folder)
    disk.mount()
    try:
        yield disk
    finally:
        disk.unmount()
