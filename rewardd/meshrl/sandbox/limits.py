"""Limits of a sandbox: of each process in it, and by a cgroup of all its processes together.

    <delegated to this service>/meshrl-<pid>-<start>/<number>     pids.max, memory.max, no swap

Cgroups are of version 2 (https://docs.kernel.org/admin-guide/cgroup-v2.html), and only where this process may make
them; elsewhere the limits of each process hold without. Groups that a kill -9 of the service leaves are removed by
the next service. A submitted function may ask for lower limits.
"""

from __future__ import annotations

import atexit
import contextlib
import difflib
import itertools
import logging
import os
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path

import pydantic
from pydantic import PositiveFloat, PositiveInt

from meshrl.common.config import Config
from meshrl.contract.errors import ConfigError
from meshrl.contract.types import Json


class ScoringLimits(Config):
    """The limits of a scoring process that a recipe sets: `reward.limits`."""

    deadline_s: PositiveFloat = 10.0
    """Wall-clock seconds of one sample (of one call, for a batch function); then its process is killed."""
    memory_bytes: PositiveInt | None = 1 << 30
    """Address space of each process (RLIMIT_AS); null: no limit. A sandbox can use `processes` times as much."""
    processes: PositiveInt | None = 8
    """Processes and threads of one sandbox together (RLIMIT_NPROC); null: no limit."""


class Limits(ScoringLimits):
    """Limits of a scoring process and of one sample in it."""

    cpu_s: PositiveInt | None = None
    """CPU seconds of one sample (RLIMIT_CPU), whole seconds; null: only the wall clock counts."""
    start_deadline_s: PositiveFloat = 30.0
    """Seconds that a process may take to import the function."""
    open_files: PositiveInt | None = 64
    """File descriptors of each process (RLIMIT_NOFILE); null: no limit."""
    tmp_bytes: PositiveInt | None = 64 << 20
    """Size of the private /tmp, and of each file (RLIMIT_FSIZE); null: no limit."""
    output_bytes: PositiveInt | None = 8 << 20
    """Bytes that a process may print between two answers; it is killed beyond that. null: no limit."""

    def bounded(self, asked: Mapping[str, Json]) -> Limits:
        """These limits, replaced where a submission asks for lower ones.

        Raises:
            ConfigError: a limit that does not exist, is no number, or exceeds the bound.
        """
        for name in asked:
            if name not in Limits.model_fields:
                near = difflib.get_close_matches(name, Limits.model_fields, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise ConfigError(
                    f"no limit {name!r}{hint} (known: {', '.join(Limits.model_fields)})"
                )
        try:
            limits = Limits.model_validate({**self.model_dump(), **asked})
        except pydantic.ValidationError as error:
            first = error.errors()[0]
            raise ConfigError(
                f"limit {'.'.join(map(str, first['loc']))}: {first['msg']}"
            ) from error
        for name in asked:
            bound, value = getattr(self, name), getattr(limits, name)
            if bound is not None and (value is None or value > bound):
                raise ConfigError(
                    f"limit {name} = {value} exceeds what the operator allows ({bound})"
                )
        return limits


log = logging.getLogger(__name__)

CONTROLLERS = ("memory", "pids")
PREFIX = "meshrl-"
SHARES = 2
"""Multiple of `memory_bytes` for a sandbox: for the scoring process and a program that it runs."""
HELPERS = 4
"""Processes beside those of the function: bubblewrap and the sandbox's first process, while they start."""
ENTER = 'echo 0 > "$0/cgroup.procs" && exec "$@"'


class NoCgroupError(Exception):
    """Why this process cannot make cgroups, in one line."""


class Cgroup:
    """The cgroup of one sandbox."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def entered(self, argv: Sequence[str]) -> list[str]:
        """The command that runs `argv` in it, from its first instruction on."""
        return ["/bin/sh", "-c", ENTER, str(self.path), *argv]

    def remove(self) -> bool:
        """Kill what is in it, and remove it; False while something there is still ending."""
        with contextlib.suppress(OSError):
            _write(self.path / "cgroup.kill", "1")
        with contextlib.suppress(FileNotFoundError):
            try:
                self.path.rmdir()
            except OSError:
                return False
        return True


class Cgroups:
    """Cgroups of this process's sandboxes, in one folder below `parent`."""

    def __init__(self, parent: Path, controllers: Sequence[str] = CONTROLLERS) -> None:
        """Raises OSError."""
        _sweep(parent)
        self.folder = parent / f"{PREFIX}{os.getpid()}-{started(os.getpid())}"
        self._numbers = itertools.count()
        self._ending: list[Cgroup] = []
        self._enable(parent, controllers)
        self.folder.mkdir(exist_ok=True)
        self._enable(self.folder, controllers)
        atexit.register(_remove_tree, self.folder)

    @staticmethod
    def _enable(folder: Path, controllers: Sequence[str]) -> None:
        for controller in controllers:
            _write(folder / "cgroup.subtree_control", f"+{controller}")

    def make(self, limits: Limits, shares: int = SHARES) -> Cgroup:
        """One more. Raises OSError."""
        self._ending = [each for each in self._ending if not each.remove()]
        path = self.folder / str(next(self._numbers))
        path.mkdir(exist_ok=True)
        for name, value in settings(limits, shares).items():
            _write(path / name, value)
        with contextlib.suppress(OSError):  # kernels without swap accounting have no such file
            _write(path / "memory.swap.max", "0")
        return Cgroup(path)

    def remove(self, cgroup: Cgroup) -> None:
        """Remove the folder of an ended sandbox; processes that still end there are removed later."""
        if not cgroup.remove():
            self._ending.append(cgroup)


def settings(limits: Limits, shares: int = SHARES) -> dict[str, str]:
    """Values for the files of a sandbox's cgroup, by file name."""
    found = {}
    if limits.processes is not None:
        found["pids.max"] = str(limits.processes + HELPERS)
    if limits.memory_bytes is not None:
        found["memory.max"] = str(shares * limits.memory_bytes + (limits.tmp_bytes or 0))
        found["memory.oom.group"] = "1"
    return found


@lru_cache(maxsize=1)
def cgroups() -> Cgroups | None:
    """The cgroups that this process makes; None if it cannot make any: one line of the log says why."""
    try:
        return Cgroups(delegated())
    except (NoCgroupError, OSError) as error:
        log.info(
            "sandboxes have limits for each process and none for all of a sandbox together: %s",
            error,
        )
        return None


def delegated(proc: Path = Path("/proc/self")) -> Path:
    """The cgroup below which this process may make others.

    Raises NoCgroupError.
    """
    try:
        lines = [line.split() for line in (proc / "mountinfo").read_text().splitlines()]
        own = (proc / "cgroup").read_text()
    except OSError as error:
        raise NoCgroupError(f"this machine has no cgroups ({error})") from error
    mounts = [line for line in lines if line[line.index("-") + 1] == "cgroup2"]
    paths = [line[3:] for line in own.splitlines() if line.startswith("0::")]
    if not mounts or not paths:
        raise NoCgroupError("no file system of type cgroup2 is mounted")
    mounted, point = Path(mounts[0][3]), Path(mounts[0][4])
    if not (path := Path(paths[0])).is_relative_to(mounted):
        raise NoCgroupError(f"the cgroup of this process, {path}, is not to be seen in {point}")
    here = point / path.relative_to(mounted)
    try:
        there = (here / "cgroup.controllers").read_text().split()
    except OSError as error:
        raise NoCgroupError(f"{here} cannot be read ({error})") from error
    if missing := [each for each in CONTROLLERS if each not in there]:
        raise NoCgroupError(
            f"cgroup v2 lacks the controllers {' and '.join(missing)} at {here}"
            " (they are mounted as version 1, or not delegated)"
        )
    # Only the root may have processes and limit those below it (the rule "no internal processes").
    parent = here if not (here / "cgroup.type").exists() else here.parent
    if parent is not here and (here == point or not _given(parent)):
        raise NoCgroupError(
            f"{here} has processes and the cgroup above it is not delegated to this service"
            " (systemd: Delegate=memory pids, DelegateSubgroup=service)"
        )
    if not os.access(parent, os.W_OK) or not os.access(parent / "cgroup.subtree_control", os.W_OK):
        raise NoCgroupError(f"{parent} cannot be written")
    return parent


def _given(folder: Path) -> bool:
    """Whether systemd, or another manager of cgroups, has delegated it to this process's user."""
    with contextlib.suppress(OSError):
        return os.getxattr(folder, "user.delegate") == b"1"
    return os.geteuid() != 0 and folder.stat().st_uid == os.geteuid()


def _write(file: Path, text: str) -> None:
    descriptor = os.open(file, os.O_WRONLY | os.O_TRUNC)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)


def started(pid: int) -> str:
    """When a process started, in ticks since boot; empty when there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""


def _sweep(parent: Path) -> None:
    """Remove what services left that are no more."""
    for folder in parent.glob(f"{PREFIX}*-*"):
        pid, _, began = folder.name.removeprefix(PREFIX).partition("-")
        if pid.isdigit() and began and started(int(pid)) != began:
            _remove_tree(folder)


def _remove_tree(folder: Path) -> None:
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            if path.is_dir():
                Cgroup(path).remove()
        folder.rmdir()
