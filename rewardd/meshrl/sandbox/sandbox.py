"""Isolates a process: three levels behind one port, each another way to start the same program.

strict   bubblewrap: own user, mount, network, process, IPC and host-name namespaces; of the file system only Python,
         read-only, and a private /tmp; a system call filter; every limit.
weak     no bubblewrap: the filter (no network, no other processes), every limit, an empty environment, a folder of
         its own. Without Landlock it can READ every file that the service can, and only file permissions limit what
         it writes. Do not use it for code from people you do not know. Refused where its user would be root.
off      a process with a deadline: protects against accidents, not against attackers.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property, lru_cache
from pathlib import Path
from typing import ClassVar

from typing_extensions import override

import meshrl
from meshrl.common.python_process import PYTHON
from meshrl.contract.errors import ConfigError
from meshrl.contract.types import Json
from meshrl.sandbox.limits import SHARES, Limits, cgroups

log = logging.getLogger(__name__)

NOBODY = 65534
"""User that a function runs as when the service runs as root."""
PROBE_S = 10.0
AS_MODULE = (sys.executable, "-P", "-m")
"""Command words before a module's name, where the environment is empty."""


class Isolation(StrEnum):
    """The level of isolation of a reward function from the machine."""

    STRICT = "strict"
    WEAK = "weak"
    OFF = "off"


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """A command that starts one scoring process, and the folder to remove when it has ended."""

    argv: Sequence[str]
    env: dict[str, str]
    confinement: Json
    """Argument of `confinement.confine`."""
    folder: Path | None = None
    """Its working directory, removed by `discard`."""
    leave: Callable[[], None] = lambda: None
    """Called by `discard`."""

    def discard(self) -> None:
        """Remove the working directory and the cgroup; idempotent."""
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
        self.leave()

    def in_cgroup(self, limits: Limits, shares: int) -> Launch:
        """This launch in a cgroup of its own, where this process can make one."""
        if (own := cgroups()) is None:
            return self
        try:
            made = own.make(limits, shares)
        except OSError as error:
            log.warning("a sandbox starts without a cgroup: %s", error)
            return self
        return replace(self, argv=made.entered(self.argv), leave=lambda: own.remove(made))


@dataclass(kw_only=True)
class Sandbox(ABC):
    """A way to start scoring processes."""

    level: ClassVar[Isolation]
    limits: Limits
    readable: tuple[Path, ...] = ()
    """Directories that it sees besides Python's, read-only, under their own paths."""

    @abstractmethod
    def launch(self, module: str, *, shares: int = SHARES) -> Launch:
        """The command for one more process: this interpreter with `module`, whose argument is its parent's pid.

        The pid is 0 where the sandbox ends the process with this one. In a cgroup all its processes together may use
        `shares` times `memory_bytes`.
        """

    def process(self, pid: int) -> int | None:
        """The pid, in our namespace, of the scoring process that `pid` is or has started; None when it ended."""
        return pid


class OpenSandbox(Sandbox):
    """No isolation: the process sees what the service sees."""

    level = Isolation.OFF

    @override
    def launch(self, module: str, *, shares: int = SHARES) -> Launch:
        """This interpreter, this environment."""
        return Launch(
            argv=[*PYTHON, module, str(os.getpid())],
            env={"OMP_NUM_THREADS": "1", **os.environ},
            confinement=_confinement(Isolation.OFF, None),
        )


class WeakSandbox(Sandbox):
    """The restrictions that a process can put on itself without bubblewrap."""

    level = Isolation.WEAK

    @override
    def launch(self, module: str, *, shares: int = SHARES) -> Launch:
        """This interpreter, an empty environment, a folder of its own."""
        folder = Path(tempfile.mkdtemp(prefix="meshrl-sandbox-"))
        seen = (*python_paths(), *self.readable)
        user = NOBODY if os.geteuid() == 0 else None
        if user is not None:
            os.chown(folder, user, user)
        return Launch(
            argv=[*AS_MODULE, module, str(os.getpid())],
            env=_environment(str(folder)),
            confinement=_confinement(Isolation.WEAK, user)
            | {
                "readable": [str(path) for path in (*system_paths(), *seen)],
                "writable": [str(folder), "/dev/null", "/dev/urandom"],
            },
            folder=folder,
        ).in_cgroup(self.limits, shares)


class StrictSandbox(Sandbox):
    """Bubblewrap around the process (https://github.com/containers/bubblewrap)."""

    level = Isolation.STRICT

    @override
    def launch(self, module: str, *, shares: int = SHARES) -> Launch:
        """Bubblewrap, which runs this interpreter."""
        return Launch(
            argv=[*self._arguments, *AS_MODULE, module, "0"],
            env=_environment("/tmp"),
            # bubblewrap started by root makes no user namespace, so that it may bind folders that only root can
            # reach; the process becomes nobody and makes its own.
            confinement=_confinement(Isolation.STRICT, NOBODY if os.geteuid() == 0 else None),
        ).in_cgroup(self.limits, shares)

    @cached_property
    def _arguments(self) -> list[str]:
        return bubblewrap(self.limits.tmp_bytes, self.readable, confined=True)

    @override
    def process(self, pid: int) -> int | None:
        """Bubblewrap's child is process 1 of the sandbox, and the first child of process 1 scores."""
        init = _first_child(pid)
        return None if init is None else _first_child(init)

    def orphans(self, pid: int) -> int:
        """Number of processes in the sandbox besides the scoring process (0 where they cannot be counted).

        Counted in the sandbox's own /proc: a process that leaves its parent stays in the namespace.
        """
        init = _first_child(pid)
        if init is None:
            return 0
        try:
            names = os.listdir(f"/proc/{init}/root/proc")  # noqa: PTH208 - a list of names, thousands of times
        except OSError:
            return 0
        return sum(name.isdigit() for name in names) - 2


def open_sandbox(level: Isolation, limits: Limits, *, readable: Sequence[Path] = ()) -> Sandbox:
    """The sandbox of a level, which sees the folders `readable`.

    Raises:
        ConfigError: this machine cannot give the level; says why, and what to do.
    """
    kind: type[Sandbox] = OpenSandbox
    if level is Isolation.WEAK:
        if os.geteuid() == 0 and (closed := _closed_to_others((*python_paths(), *readable))):
            raise ConfigError(
                "reward sandbox 'weak' would run functions as root: the user nobody cannot read "
                f"{closed}; run the service as an ordinary user, or chmod o+rX {closed}"
            )
        kind = WeakSandbox
    if level is Isolation.STRICT:
        if (why := no_bubblewrap()) is not None:
            raise ConfigError(
                f"reward sandbox 'strict' is not available here: {why} "
                "(install the package bubblewrap, or allow less: reward.sandbox: weak)"
            )
        hidden = [path for path in readable if not _open_to_others(path)]
        if os.geteuid() == 0 and hidden:
            raise ConfigError(
                f"functions of a service that runs as root run as nobody, who cannot read {hidden[0]}:"
                " chmod -R o+rX it"
            )
        kind = StrictSandbox
    return kind(limits=limits, readable=tuple(readable))


@lru_cache(maxsize=1)
def no_bubblewrap() -> str | None:
    """Why bubblewrap does not work on this machine; None when it does. Tried once per process."""
    if sys.platform != "linux":
        return "it needs Linux"
    if shutil.which("bwrap") is None:
        return "there is no bwrap on PATH"
    argv = [*bubblewrap(1 << 20, ()), sys.executable, "-I", "-S", "-c", ""]
    try:
        done = subprocess.run(
            argv, env=_environment("/tmp"), capture_output=True, text=True, timeout=PROBE_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"bwrap does not run: {error}"
    if done.returncode != 0:
        return f"bwrap fails with {(done.stderr.strip().splitlines() or ['nothing'])[-1]!r}"
    return None


def bubblewrap(
    tmp_bytes: int | None, readable: Sequence[Path], *, confined: bool = False
) -> list[str]:
    """The command line up to the program: namespaces and mounts; nothing is inherited.

    `confined`: the program calls `confinement.confine`, which makes a user namespace of its own and then allows none.
    """
    arguments = ["bwrap", "--die-with-parent", "--unshare-ipc", "--unshare-pid", "--unshare-net"]
    arguments += ["--unshare-uts", "--unshare-cgroup-try", "--hostname", "sandbox"]
    if os.geteuid() == 0:
        arguments += ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    else:
        arguments.append("--unshare-user")
        if not confined:
            arguments.append("--disable-userns")
        arguments += ["--uid", str(NOBODY), "--gid", str(NOBODY)]
    size = str(tmp_bytes or 1 << 30)
    arguments += ["--proc", "/proc", "--dev", "/dev", "--remount-ro", "/dev"]
    arguments += ["--perms", "1777", "--size", size, "--tmpfs", "/tmp"]
    mounts = sorted({*python_paths(), *readable})
    # bubblewrap makes the folders above a mount for its own user alone, and the function becomes another.
    above = {folder for path in (Path("/etc/_"), *mounts) for folder in path.parents}
    for folder in sorted(above - {Path("/"), Path("/tmp")}):
        if not any(folder.is_relative_to(mount) for mount in (Path("/usr"), *mounts)):
            arguments += ["--perms", "0755", "--dir", str(folder)]
    for path in system_paths():
        kind = (
            ["--symlink", str(path.readlink())] if path.is_symlink() else ["--ro-bind", str(path)]
        )
        arguments += [*kind, str(path)]
    for path in mounts:
        arguments += ["--ro-bind", str(path), str(path)]
    return [*arguments, "--remount-ro", "/", "--chdir", "/tmp", "--"]


def system_paths() -> list[Path]:
    """System folders that an interpreter and its shared libraries need."""
    names = ("/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache")
    return [path for path in map(Path, names) if path.exists()]


def python_paths() -> set[Path]:
    """This interpreter, its packages, and the packages of ours that a scoring process imports."""
    ours = {
        Path(portion)
        for portion in meshrl.__path__
        if any(
            (Path(portion) / name).is_dir() for name in ("common", "contract", "rewardd", "sandbox")
        )
    }
    packages = {Path(sysconfig.get_path(name)) for name in ("purelib", "platlib")}
    paths = {Path(sys.base_prefix), Path(sys.prefix), *packages, *ours}
    return {path for path in paths if path.is_dir() and not path.is_relative_to("/usr")}


def _confinement(level: Isolation, user: int | None) -> dict[str, Json]:
    return {"level": level, "user": user}


def _environment(home: str) -> dict[str, str]:
    return {
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "HOME": home,
        "TMPDIR": home,
        "LANG": "C.UTF-8",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONHASHSEED": "0",
    }


def _closed_to_others(paths: Iterable[Path]) -> Path | None:
    """The first folder, of these and of those above them, that the user nobody cannot read."""
    for path in map(Path.absolute, paths):
        for folder in (*reversed(path.parents), path):
            if folder.exists() and not _open_to_others(folder):
                return folder
    return None


def _open_to_others(folder: Path) -> bool:
    return folder.stat().st_mode & 0o005 == 0o005


def _first_child(pid: int) -> int | None:
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])
    return None
