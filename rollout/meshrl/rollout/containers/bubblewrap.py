"""Boxes of bubblewrap over an unpacked root: no daemon, no root, nothing on a disk.

    worker ─┬─ bwrap (user namespace) ── processes 1 and 2          dies with the worker, and all of the box with it
            └─ enter.py ── a command in the same namespaces          one for each call

What a box writes lies in memory of its own mount namespace, over the image, which no box can change. So a box whose
worker was killed leaves no process, no mount and no file: the kernel ends the namespaces with their first process.
The image is a folder, a tarball of a root file system, or `host`: this machine's /usr, read-only.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import json
import os
import platform
import re
import shutil
import signal
import socket
import stat
import tarfile
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from weakref import WeakSet

from meshrl.contract.errors import ConfigError, NotFoundError, UnavailableError, UserError
from meshrl.rollout.config import ContainersConfig
from meshrl.rollout.containers import enter
from meshrl.rollout.containers.box import (
    LAST_LINES,
    VARIABLES,
    BoxLimits,
    Finished,
    Image,
    ImageError,
    Output,
    absolute,
    is_gone,
    owner,
    pack,
)
from meshrl.rollout.containers.loopback import HELPER, START_S, listen_in
from meshrl.sandbox import seccomp
from meshrl.sandbox.limits import Cgroup, Limits, cgroups
from meshrl.sandbox.sandbox import NOBODY, no_bubblewrap

HOST = "host"
"""The image that is made of this machine's /usr."""
BOX = re.compile(r"meshrl-[0-9a-f]{8}(-\d+){4}")
"""The name of a box: bubblewrap's processes have it in place of their program's."""
ENDED = 128 + signal.SIGKILL
LOOK_S = 0.2
"""Seconds in which a box ends that took a command with it."""
PIPE_BYTES = 1 << 16
READS = 16
"""Reads of one command's output before others have their turn."""
FILTER = seccomp.program(platform.machine(), agent_beside=enter.HOLDER) or b""
SKELETON = {
    "etc/passwd": "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/false\n",
    "etc/group": "root:x:0:\nnogroup:x:65534:\n",
    "etc/hosts": "127.0.0.1 localhost box\n::1 localhost\n",
    "etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
}
"""Files of the image `host`."""
LENT = ("/etc/ld.so.cache", "/etc/alternatives")
"""Files outside /usr that it refers to."""


def build(config: ContainersConfig) -> Bubblewrap:
    """The backend for a recipe. Raises ConfigError."""
    if (why := no_bubblewrap()) is not None:
        raise ConfigError(f"rollout.containers.backend: bubblewrap does not work here: {why}")
    return Bubblewrap(config.store, config.lent)


class Bubblewrap:
    """The backend."""

    def __init__(self, store: Path | None = None, lent: Sequence[Path] = ()) -> None:
        """Prepare; nothing is made before `prepare` or `sweep`.

        Args:
            store: Where images are unpacked, on a disk; None: a folder of this user in /var/tmp.
            lent: Folders of this machine that every box can read.
        """
        self._lent = lent
        self._store = store or Path(f"/var/tmp/meshrl-images-{os.geteuid()}")
        self._user = NOBODY if os.geteuid() == 0 else None
        self._roots: dict[Image, Path] = {}
        self._numbers = itertools.count()

    async def prepare(self, image: Image) -> None:
        """Unpack it. Raises ImageError."""
        self._roots[image] = await asyncio.to_thread(self._unpacked, image)

    async def start(self, image: Image, limits: BoxLimits, *, row: str) -> BubblewrapBox:
        """A box of a prepared image. Raises ImageError, UnavailableError."""
        if (root := self._roots.get(image)) is None:
            raise ImageError(f"{image.name} is not prepared")
        paths = ["/usr", *filter(os.path.exists, LENT)] if image.name == HOST else []
        binds: list[str] = []
        for path in (*paths, *map(str, self._lent)):
            binds += ["--ro-bind", path, path]
        box = BubblewrapBox(f"meshrl-{owner()}-{next(self._numbers)}", limits, self._user)
        mounted = str(self._store / "mounted")
        await box.open({"lower": str(root), "mounted": mounted, "binds": binds}, image.name)
        return box

    async def sweep(self) -> int:
        """Remove half-unpacked images of dead workers, and kill boxes that bubblewrap left while they started."""
        return await asyncio.to_thread(self._sweep)

    async def close(self) -> None:
        """Do nothing: no box is open."""

    def _sweep(self) -> int:
        for part in self._store.glob("*.part"):
            if is_gone(part.suffixes[0][1:]):
                shutil.rmtree(part, ignore_errors=True)
        return _kill_left(lambda name: is_gone(name.split("-", 1)[1].rpartition("-")[0]))

    def _unpacked(self, image: Image) -> Path:
        """The root of an image, made if need be. What is there under its final name is whole."""
        if image.build is not None:
            raise ImageError(
                f"{image.build}: bubblewrap builds no Dockerfile; name an unpacked root or a tarball,"
                " or use rollout.containers.backend: podman"
            )
        self._own_store()
        source = Path(image.name)
        if image.name == HOST:
            return self._made("host", self._make_host)
        if source.is_dir() and self._user is None:
            return _checked(source.resolve(), image.name)
        if not source.is_dir() and not source.is_file():
            raise ImageError(f"{image.name}: no unpacked root and no tarball; or 'host'")
        known = source.stat()
        key = f"{source.resolve()} {known.st_mtime_ns} {known.st_size}"
        digest = hashlib.sha256(key.encode()).hexdigest()[:24]
        root = self._made(digest, lambda part: self._unpack(source, part))
        return _checked(root, image.name)

    def _own_store(self) -> None:
        """Make a folder of this user that every process may pass through."""
        self._store.mkdir(mode=0o755, parents=True, exist_ok=True)
        if self._store.is_symlink() or self._store.stat().st_uid != os.geteuid():
            raise ConfigError(f"{self._store} belongs to another user: remove it")
        (self._store / "mounted").mkdir(exist_ok=True)

    def _made(self, name: str, make: Callable[[Path], None]) -> Path:
        """A folder that `make` fills under another name first; the first of several workers makes it."""
        root = self._store / name
        if not root.exists():
            part = self._store / f"{name}.{owner()}.part"
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir()
            if self._user is not None:
                os.chown(part, self._user, self._user)
            try:
                make(part)
                with contextlib.suppress(OSError):  # another worker was first
                    part.rename(root)
            finally:
                shutil.rmtree(part, ignore_errors=True)
        return root

    def _make_host(self, part: Path) -> None:
        for name in ("etc", "root", "home", "opt", "srv", "var/tmp", "tmp", "usr"):
            (part / name).mkdir(parents=True)
        for name in ("tmp", "var/tmp"):
            (part / name).chmod(0o1777)
        for path in (Path("/bin"), Path("/sbin"), *Path("/").glob("lib*")):
            if path.is_symlink():
                (part / path.name).symlink_to(path.readlink())
        for name, text in SKELETON.items():
            (part / name).write_text(text)
        self._own(part)

    def _unpack(self, source: Path, part: Path) -> None:
        try:
            if source.is_dir():
                shutil.copytree(source, part, symlinks=True, ignore=_devices, dirs_exist_ok=True)
            else:
                with tarfile.open(source) as archive:
                    archive.extractall(part, filter=_member)
            self._own(part)
        except (OSError, tarfile.TarError, shutil.Error) as error:
            lines = str(error).replace("), (", "\n").splitlines()[-LAST_LINES:]
            raise ImageError(f"{source} cannot be unpacked: " + "\n".join(lines)) from error

    def _own(self, part: Path) -> None:
        """Give it to the user of the boxes, whose root owns all of it then."""
        if self._user is not None:
            for folder, folders, files in os.walk(part):
                for name in (".", *folders, *files):
                    os.chown(Path(folder, name), self._user, self._user, follow_symlinks=False)


class BubblewrapBox:
    """A running one."""

    def __init__(self, name: str, limits: BoxLimits, user: int | None) -> None:
        self.name = name
        self._limits = limits
        self._user = user
        self._pidfd = -1
        self._over = False
        self._cgroup: Cgroup | None = None
        self._ended: asyncio.Task[None] | None = None
        self._outputs: WeakSet[_Printed] = WeakSet()

    async def open(self, request: Mapping[str, Any], image: str) -> None:
        """Start it; called once. Raises ImageError, UnavailableError."""
        self._enter_cgroup()
        request = {**request, "name": self.name, "disk_bytes": self._limits.disk_bytes}
        process = await self._entering("open", request, stderr=asyncio.subprocess.STDOUT)
        assert process.stdout is not None
        try:
            async with asyncio.timeout(START_S):
                said = await process.stdout.readline()
                if said != b"\n":
                    said += await process.stdout.read()
            if not said:
                raise UnavailableError(f"a box of {image} was ended while it started")
            if said != b"\n":
                raise ImageError(f"no box starts from {image}: {said.decode().strip()}")
            self._pidfd = os.pidfd_open(_first_child(process.pid))
        except (TimeoutError, OSError, IndexError) as error:
            problem = f"a box of {image} does not start within {START_S:g} s"
            raise UnavailableError(problem) from error
        finally:
            if self._pidfd < 0:
                _signal(process, signal.SIGKILL)
                await self._until_end(process)
                await asyncio.to_thread(_kill_left, self.name.__eq__)
        self._ended = asyncio.create_task(self._until_end(process), name=f"box {self.name}")

    async def run(
        self,
        command: Sequence[str],
        *,
        timeout_s: float,
        stdin: bytes = b"",
        folder: str = "/",
        variables: Mapping[str, str] = {},
    ) -> Finished:
        """Run a command. Raises UnavailableError."""
        request = {
            "command": list(command),
            "folder": folder,
            "variables": {**VARIABLES, **variables},
            "processes": self._limits.processes,
            "memory_bytes": self._limits.memory_bytes,
            "filter": FILTER.hex(),
        }
        read, write = os.pipe()
        output = _Printed(read)
        self._outputs.add(output)
        try:
            process = await self._entering("run", request, stdout=write)
        except BaseException:
            output.close()
            raise
        finally:
            os.close(write)
        timed_out = False
        try:
            async with asyncio.timeout(timeout_s):
                said = await _ended(process, stdin)
        except TimeoutError:
            timed_out = True
        finally:
            if process.returncode is None:
                _signal(process, signal.SIGTERM)
        if timed_out:
            said = await _ended(process, b"")
        # Processes that the command left may print on: what they print is read and forgotten.
        output.read()
        code = process.returncode
        assert code is not None
        if code == ENDED and not timed_out and self._ended is not None:
            await asyncio.wait({self._ended}, timeout=LOOK_S)
        if said or code < 0 or self._over:
            raise self._fault(said)
        return Finished(exit_code=code, output=output.text(), timed_out=timed_out)

    async def put(self, source: Path, target: str) -> None:
        """Copy a file or a folder. Raises UserError, UnavailableError."""
        where = absolute(target)
        with tempfile.TemporaryFile() as packed:
            await asyncio.to_thread(pack, source, where.name, packed)
            packed.seek(0)
            process = await self._entering("put", {"target": target}, stdin=packed.fileno())
            await self._checked(process, f"{self.name}: {target}: ")

    async def get(self, source: str, most_bytes: int) -> bytes:
        """The content of a file. Raises NotFoundError, UserError, UnavailableError."""
        request = {"source": source, "most_bytes": most_bytes}
        process = await self._entering("get", request, stdout=asyncio.subprocess.PIPE)
        return await self._checked(process, f"{self.name}: ")

    async def listen(self) -> socket.socket:
        """A socket on its loopback. Raises UnavailableError."""
        if self._over:
            raise self._fault(b"")
        pidfd = os.dup(self._pidfd)  # the box may end meanwhile
        return await listen_in(pidfd, self.name, enter.ENTERED, user=self._user)

    async def stop_processes(self) -> None:
        """Kill what was started in it. Raises UnavailableError."""
        await self._checked(await self._entering("stop", {}), f"{self.name}: ")

    async def close(self) -> None:
        """End it, and wait until nothing of it is left; idempotent."""
        if self._ended is not None:
            self._kill()
            await asyncio.shield(self._ended)

    def _kill(self) -> None:
        if not self._over:
            self._over = True
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    async def _until_end(self, process: asyncio.subprocess.Process) -> None:
        """Wait for the end of bubblewrap, which waits for process 1; then remove what belongs to the box."""
        expiry = asyncio.get_running_loop().call_later(self._limits.time_s, self._kill)
        await process.wait()
        expiry.cancel()
        self._over = True
        if self._pidfd >= 0:
            os.close(self._pidfd)
        for output in self._outputs:
            output.close()
        if self._cgroup is not None and (own := cgroups()) is not None:
            own.remove(self._cgroup)

    async def _entering(
        self, form: str, request: Mapping[str, Any], **streams: Any
    ) -> asyncio.subprocess.Process:
        """A process of `enter.py`. Raises UnavailableError: the box has ended."""
        if self._over:
            raise self._fault(b"")
        request = {**request, "user": self._user, "pidfd": self._pidfd}
        argv = [*HELPER, form, str(os.getpid()), json.dumps(request)]
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), asyncio.subprocess.PIPE) | streams
        return await asyncio.create_subprocess_exec(
            *(self._cgroup.entered(argv) if self._cgroup else argv),
            **pipes,
            env={"PATH": os.defpath},
            cwd="/",
            pass_fds=() if form == "open" else (self._pidfd,),
            start_new_session=True,  # no Ctrl-C of a terminal reaches it
        )

    async def _checked(self, process: asyncio.subprocess.Process, where: str) -> bytes:
        """The output of a form that runs nothing of the box's."""
        try:
            printed, said = await process.communicate()
        finally:
            if process.returncode is None:
                _signal(process, signal.SIGTERM)
        if process.returncode == 0:
            return printed or b""
        if self._over or process.returncode not in (enter.NOT_FOUND, enter.REFUSED):
            raise self._fault(said)
        kind = NotFoundError if process.returncode == enter.NOT_FOUND else UserError
        raise kind(where + said.decode(errors="replace").strip())

    def _fault(self, said: bytes) -> UnavailableError:
        why = said.decode(errors="replace").strip() or "it has ended"
        return UnavailableError(f"the box {self.name} cannot be entered: {why}")

    def _enter_cgroup(self) -> None:
        if (own := cgroups()) is not None:
            limits = Limits(
                memory_bytes=self._limits.memory_bytes,
                processes=self._limits.processes,
                tmp_bytes=self._limits.disk_bytes,
            )
            with contextlib.suppress(OSError):
                self._cgroup = own.make(limits, shares=1)


class _Printed(Output):
    """Output that is read from a pipe for as long as anybody can write to it."""

    def __init__(self, pipe: int) -> None:
        super().__init__()
        self._pipe = pipe
        os.set_blocking(pipe, False)
        asyncio.get_running_loop().add_reader(pipe, self.read)

    def read(self) -> None:
        """Take what is there."""
        for _ in range(READS if self._pipe >= 0 else 0):
            try:
                data = os.read(self._pipe, PIPE_BYTES)
            except BlockingIOError:
                return
            if not data:
                self.close()
                return
            self.add(data)

    def close(self) -> None:
        """Read no more; idempotent."""
        if self._pipe >= 0:
            asyncio.get_running_loop().remove_reader(self._pipe)
            os.close(self._pipe)
            self._pipe = -1


def _kill_left(chosen: Callable[[str], bool]) -> int:
    """Kill first processes of `chosen` boxes: one whose bubblewrap dies at once does not know of it.

    A bubblewrap that is killed here may just have made one, so it looks again until there is none.
    """
    killed: set[str] = set()
    while True:
        found = set()
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                name = path.read_bytes().partition(b"\0")[0].decode(errors="replace")
                if BOX.fullmatch(name) and chosen(name):
                    os.kill(int(path.parent.name), signal.SIGKILL)
                    found.add(path.parent.name)
        if not found:
            return len(killed)
        killed |= found
        time.sleep(0.01)


def _signal(process: asyncio.subprocess.Process, number: int) -> None:
    """Signal a process without asyncio, whose methods may reap it before its watcher."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(process.pid, number)


def _first_child(pid: int) -> int:
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])


async def _ended(process: asyncio.subprocess.Process, stdin: bytes) -> bytes:
    """Feed it, and wait for its end; what `enter.py` itself complained of."""
    assert process.stdin is not None and process.stderr is not None
    # It may have ended by now: uvloop, in which workers run, says so by a RuntimeError.
    with contextlib.suppress(ConnectionError, RuntimeError):
        process.stdin.write(stdin)
        await process.stdin.drain()
    process.stdin.close()
    said = await process.stderr.read()
    await process.wait()
    return said


def _member(member: tarfile.TarInfo, path: str) -> tarfile.TarInfo | None:
    """A member of a root's tarball as it is; no devices, and nothing outside."""
    checked = tarfile.tar_filter(member, path)
    return None if member.isdev() else checked.replace(mode=member.mode, deep=False)


def _devices(folder: str, names: list[str]) -> list[str]:
    """The names of files that cannot be copied."""
    kinds = (stat.S_ISREG, stat.S_ISDIR, stat.S_ISLNK)
    modes = {name: Path(folder, name).lstat().st_mode for name in names}
    return [name for name, mode in modes.items() if not any(kind(mode) for kind in kinds)]


def _checked(root: Path, name: str) -> Path:
    shell = root / "bin/sh"
    if not shell.is_symlink() and not shell.exists():
        raise ImageError(
            f"{name}: no root file system (it has no /bin/sh); want what `podman export` makes"
        )
    return root
