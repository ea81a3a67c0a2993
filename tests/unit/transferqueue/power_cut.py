"""A disk whose power can be cut: ext4 on a loop device, shut down as a crash leaves it (FS_IOC_SHUTDOWN, no flush).

What was fsynced is there after the next mount; what was only in the page cache is gone, except for what the kernel
happened to write back. This is what xfstests does.
"""

from __future__ import annotations

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
