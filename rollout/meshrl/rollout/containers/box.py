"""Ports and types of containers: an image, its limits, a running box, and what starts one.

    Backend.prepare(image) ── once ──▶ Backend.start(image, limits, row) ──▶ Box ── run, put, get ──▶ close

A box belongs to one row, from its lease to its end. It dies with the process that started it, however that one ends;
what outlives both (a machine that lost power) is removed by the next `sweep`.
"""

from __future__ import annotations

import os
import re
import socket
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Protocol

from pydantic import PositiveFloat, PositiveInt, field_validator

from meshrl.common.config import Config
from meshrl.contract.errors import UserError
from meshrl.sandbox.limits import started

OUTPUT_BYTES = 64 << 10
"""The most bytes of a command's output that are kept: its beginning and its end."""
LAST_LINES = 20
"""Lines that are kept of the output of a failed image build."""
VARIABLES = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": "/root",
    "LANG": "C.UTF-8",
    "TERM": "dumb",
}
"""Environment of a command, where it asks for nothing else."""
POD_LABELS = {"app.kubernetes.io/name": "meshrl-box"}
"""Labels of containers that are pods, by which a NetworkPolicy chooses them."""
HOST_NAME = re.compile(
    r"([a-z0-9]([a-z0-9-]*[a-z0-9])?\.)+[a-z]([a-z0-9-]*[a-z0-9])?", re.IGNORECASE
)
"""A name with a dot, and no number."""


class ImageError(UserError):
    """An image cannot be fetched, built or unpacked; holds the last lines of the output."""


class BoxLimits(Config):
    """The most that one box uses."""

    cpus: PositiveFloat = 1.0
    """Cores; kept by podman, docker and kubernetes."""
    memory_bytes: PositiveInt = 1 << 30
    """Memory of all its processes together; with bubblewrap of each process where this machine gives no cgroup."""
    processes: PositiveInt = 256
    """Processes and threads together."""
    disk_bytes: PositiveInt = 1 << 30
    """Bytes that it may write; with bubblewrap they lie in memory."""
    time_s: PositiveFloat = 3600.0
    """Seconds from its start to its end, whatever it does then."""
    hosts: tuple[str, ...] = ()
    """Names of hosts that an agent may reach by http and https, through a proxy that the usual variables name."""

    @field_validator("hosts")
    @classmethod
    def _names(cls, hosts: tuple[str, ...]) -> tuple[str, ...]:
        for name in hosts:
            if not HOST_NAME.fullmatch(name):
                raise ValueError(f"{name!r:.80}: want the name of a host, as pypi.org")
        return hosts


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """The file system that a box starts from. Equal images are prepared once."""

    name: str
    """A name in a registry or of the engine's store; for bubblewrap, the path of an unpacked root or of a tarball."""
    build: Path | None = None
    """A folder with a Dockerfile: the image is built from it, and is called `name`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """A command that has ended."""

    exit_code: int
    """128 + n for signal n."""
    output: bytes
    """stdout and stderr in the order of their writing; at most OUTPUT_BYTES, cut in the middle with a notice."""
    timed_out: bool
    """Whether it was ended at its time limit."""


class Output:
    """Bytes that a command prints: its beginning and its end are kept."""

    def __init__(self, most: int = OUTPUT_BYTES) -> None:
        self._most = most
        self._head = bytearray()
        self._tail = bytearray()
        self._size = 0

    def add(self, data: bytes) -> None:
        """Add output."""
        self._size += len(data)
        room = self._most // 2 - len(self._head)
        self._head += data[:room]
        self._tail += data[room:]
        del self._tail[: len(self._tail) - self._most // 2]

    def text(self) -> bytes:
        """At most `most` bytes and the notice of what is left out."""
        left_out = self._size - len(self._head) - len(self._tail)
        notice = b"\n[... %d bytes left out ...]\n" % left_out if left_out else b""
        return bytes(self._head + notice + self._tail)


def owner() -> str:
    """This process, for names and labels: `BOOT-NAMESPACE-PID-START`."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text()[:8]
    space = Path("/proc/self/ns/pid").stat().st_ino
    return f"{boot}-{space}-{os.getpid()}-{started(os.getpid())}"


def is_gone(label: str) -> bool:
    """Whether an owner is known to be no more; of another namespace's processes that is not known."""
    boot, space, pid, began = label.split("-")
    here = owner().split("-")
    return boot != here[0] or (space == here[1] and started(int(pid)) != began)


def absolute(target: str) -> PurePosixPath:
    """Check the target of `put`. Raises UserError."""
    where = PurePosixPath(target)
    if not where.is_absolute() or where == PurePosixPath("/") or ".." in where.parts:
        raise UserError(f"{target}: want an absolute path below /")
    return where


def pack(source: Path, name: str, packed: IO[bytes]) -> None:
    """Write a tar file of a file or folder that is called `name` there and belongs to root."""

    def of_root(member: tarfile.TarInfo) -> tarfile.TarInfo:
        member.uid = member.gid = 0
        member.uname = member.gname = "root"
        return member

    with tarfile.open(fileobj=packed, mode="w|") as archive:
        archive.add(source, name, filter=of_root)


class Box(Protocol):
    """A running container. Each method raises UnavailableError once the box has ended."""

    @property
    def name(self) -> str:
        """Unique among all boxes of this machine."""
        ...

    async def run(
        self,
        command: Sequence[str],
        *,
        timeout_s: float,
        stdin: bytes = b"",
        folder: str = "/",
        variables: Mapping[str, str] = {},
    ) -> Finished:
        """Run a command to its end, its time limit, or the cancellation of this call.

        Processes that it leaves in the background stay until `stop_processes`.
        """
        ...

    async def put(self, source: Path, target: str) -> None:
        """Copy a file or a folder to the absolute path `target`, in place of what is there.

        Folders above it are made.

        Raises:
            UserError: the box has no room for it, or `target` cannot be written.
        """
        ...

    async def get(self, source: str, most_bytes: int) -> bytes:
        """The content of a file in the box.

        Raises:
            NotFoundError: there is no regular file of that path.
            UserError: it is longer than `most_bytes`.
        """
        ...

    async def listen(self) -> socket.socket:
        """A listening socket on the loopback of the box: accepted here, reached by its processes alone.

        Raises:
            UserError: this process has no right to the network of the box.
        """
        ...

    async def stop_processes(self) -> None:
        """Kill everything that was started in the box; its file system stays, and `run` works again."""
        ...

    async def close(self) -> None:
        """End the box and remove all of it; idempotent."""
        ...


class Backend(Protocol):
    """A starter of boxes: a module of `meshrl.rollout.containers`."""

    async def prepare(self, image: Image) -> None:
        """Fetch, build or unpack an image, so that boxes start at once; called once for each.

        Raises:
            ImageError: it is unavailable. The message ends with the last lines of the output.
            UnavailableError: the engine does not answer.
        """
        ...

    async def start(self, image: Image, limits: BoxLimits, *, row: str) -> Box:
        """A new box of a prepared image. `row` is written to its labels, for people.

        Raises:
            ImageError: the image is not prepared, or nothing starts from it.
            UnavailableError: the engine does not answer.
        """
        ...

    async def sweep(self) -> int:
        """Remove the boxes of owners that are no more, on this machine; how many they were."""
        ...

    async def close(self) -> None:
        """Remove what this process has left, and let the engine go; idempotent."""
        ...
