"""Boxes of podman and docker, through the socket of their API (the docker SDK speaks both).

    worker ──API──▶ engine ──▶ container: process 1 is a bash of this machine, mounted read-only
      └── a process that reads stdin ── end of stdin: the worker is dead ──▶ removes the worker's containers

The tools by which commands run are this machine's, in a folder that a container cannot write, so the engine must run
here, too. Process 1 ends at the box's time; the next worker removes the containers of owners that are no more, by
their labels.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from typing_extensions import override

from meshrl.common.python_process import PYTHON
from meshrl.contract.errors import ConfigError, UnavailableError
from meshrl.rollout.config import ContainersConfig
from meshrl.rollout.containers.box import LAST_LINES, BoxLimits, Image, ImageError, is_gone, owner
from meshrl.rollout.containers.commands import (
    ANSWER_S,
    BASH,
    HOLD,
    OWNER,
    PROGRAMS,
    ROW,
    TOOLS,
    CommandBox,
)
from meshrl.rollout.containers.enter import CAPABILITIES, CLONE_NEWNET, CLONE_NEWUSER
from meshrl.rollout.containers.loopback import listen_in

try:
    import docker
    from docker.errors import APIError, BuildError, DockerException, ImageNotFound
    from docker.errors import NotFound as MissingError
    from docker.types import Ulimit
    from docker.utils.socket import frames_iter
except ImportError as error:
    raise ConfigError("podman and docker need: pip install 'meshrl[containers]'") from error

T = TypeVar("T")
SOCKETS = {
    "docker": ("/var/run/docker.sock",),
    "podman": ("/run/podman/podman.sock", "{XDG_RUNTIME_DIR}/podman/podman.sock"),
}


def build(config: ContainersConfig) -> ContainerEngine:
    """The backend for a recipe. Raises ConfigError: no socket, no engine that answers, or no tools here."""
    candidates = [os.environ.get("DOCKER_HOST", "")]
    for path in SOCKETS[config.backend]:
        known = Path(path.format_map({"XDG_RUNTIME_DIR": os.environ.get("XDG_RUNTIME_DIR", "/-")}))
        candidates += [f"unix://{known}"] if known.exists() else []
    address = next(filter(None, candidates), None)
    where = f"rollout.containers.backend: {config.backend}"
    if address is None:
        raise ConfigError(f"{where}: no socket at {SOCKETS[config.backend][0]}; set DOCKER_HOST")
    try:
        engine = ContainerEngine(address, calls=config.boxes + 2 * config.starts, lent=config.lent)
    except DockerException as error:
        raise ConfigError(f"{where}: {address} does not answer: {error}") from error
    return engine


class ContainerEngine:
    """The backend."""

    def __init__(self, address: str, *, calls: int = 16, lent: Sequence[Path] = ()) -> None:
        """Connect to the API at `address`, for at most `calls` at once. Raises DockerException, ConfigError."""
        self._address = address
        self.client = docker.DockerClient(base_url=address, timeout=ANSWER_S, max_pool_size=calls)
        self._threads = ThreadPoolExecutor(calls, thread_name_prefix="containers")
        self._volumes = {path: {"bind": f"{TOOLS}/{name}", "mode": "ro"} for name, path in _tools()}
        self._volumes |= {str(path): {"bind": str(path), "mode": "ro"} for path in lent}
        self._numbers = itertools.count()
        self._guard: subprocess.Popen[bytes] | None = None

    async def call(self, function: Callable[..., T], *arguments: Any, **more: Any) -> T:
        """A call of the SDK in a thread. Raises UnavailableError: the engine does not answer, or fails itself."""
        loop = asyncio.get_running_loop()
        try:
            work = functools.partial(function, *arguments, **more)
            return await loop.run_in_executor(self._threads, work)
        except (DockerException, OSError) as error:
            refused = isinstance(error, APIError) and error.is_client_error()
            if refused or isinstance(error, BuildError):
                raise
            raise UnavailableError(f"the engine at {self._address}: {error}") from error

    async def prepare(self, image: Image) -> None:
        """Pull or build it, where it is missing. Raises ImageError, UnavailableError."""
        try:
            if image.build is not None:
                await self.call(self._build, image)
                return
            with contextlib.suppress(ImageNotFound):
                await self.call(self.client.images.get, image.name)
                return
            await self._pull(image.name)
        except BuildError as error:
            said = "".join(part.get("stream") or part.get("error", "") for part in error.build_log)
            lines = said.splitlines()[-LAST_LINES:] or [str(error)]
            raise ImageError(f"{image.name} cannot be built:\n" + "\n".join(lines)) from error
        except (APIError, TypeError) as error:  # TypeError: no folder with a Dockerfile
            raise ImageError(f"{image.name} cannot be had: {error}") from error

    async def _pull(self, name: str) -> None:
        """Pull an image. Raises APIError (docker answers 500 for a fault of the registry), UnavailableError."""
        try:
            await self.call(self.client.images.pull, name)
        except UnavailableError as error:
            if isinstance(error.__cause__, APIError):
                raise error.__cause__ from None
            raise

    def _build(self, image: Image) -> None:
        self.client.images.build(path=str(image.build), tag=image.name, rm=True, forcerm=True)

    async def start(self, image: Image, limits: BoxLimits, *, row: str) -> EngineBox:
        """A container of a prepared image. Raises ImageError, UnavailableError."""
        self._guarded()
        box = EngineBox(self, f"meshrl-{owner()}-{next(self._numbers)}", limits)
        try:
            creating = self.call(
                self.client.containers.create,
                image.name,
                entrypoint=BASH,
                command=[HOLD, str(int(limits.time_s) + 1)],
                name=box.name,
                hostname="box",
                labels={OWNER: owner(), ROW: row},
                volumes=self._volumes,
                working_dir="/",
                user="0:0",
                network_mode="none",
                cap_drop=["ALL"],
                cap_add=list(CAPABILITIES),
                security_opt=["no-new-privileges"],
                nano_cpus=int(limits.cpus * 1e9),
                mem_limit=limits.memory_bytes,
                memswap_limit=limits.memory_bytes,
                pids_limit=limits.processes,
                ulimits=[
                    Ulimit(name="nofile", soft=1024, hard=4096),
                    Ulimit(name="nproc", soft=limits.processes, hard=limits.processes),
                    Ulimit(name="fsize", soft=limits.disk_bytes, hard=limits.disk_bytes),
                    Ulimit(name="core", soft=0, hard=0),
                ],
            )
            await box.open(creating, box.begin)
        except APIError as error:
            raise ImageError(f"no box starts from {image.name}: {error}") from error
        return box

    async def sweep(self) -> int:
        """Remove the containers of owners that are no more. Raises UnavailableError."""
        return await self.call(self.remove, is_gone)

    def remove(self, chosen: Callable[[str], bool]) -> int:
        """Remove those whose owner is `chosen`; how many."""
        filters = {"label": OWNER}
        removed = 0
        for each in self.client.containers.list(all=True, filters=filters, ignore_removed=True):
            if chosen(each.labels[OWNER]):
                with contextlib.suppress(APIError):
                    each.remove(force=True)
                    removed += 1
        return removed

    async def close(self) -> None:
        """Have the guard remove what is left, and close the connections; idempotent."""
        guard, self._guard = self._guard, None
        if guard is not None:
            await asyncio.to_thread(guard.communicate)
        self._threads.shutdown(wait=False)
        self.client.close()

    def _guarded(self) -> None:
        """Start the process that removes this one's containers after its death, if it does not run."""
        if self._guard is None or self._guard.poll() is not None:
            self._guard = subprocess.Popen(
                [*PYTHON, __name__, self._address, owner()],
                stdin=subprocess.PIPE,
                start_new_session=True,
            )


class EngineBox(CommandBox):
    """A running container."""

    def __init__(self, engine: ContainerEngine, name: str, limits: BoxLimits) -> None:
        super().__init__(name, limits)
        self._engine = engine
        self._container: Any = None

    async def begin(self, container: Any) -> None:
        """Start it. Raises APIError, UnavailableError."""
        self._container = container
        await self._engine.call(container.start)

    @override
    def talk(self, script: str, given: bytes) -> Iterator[bytes | int]:
        api = self._engine.client.api
        words = [*BASH, script]
        exec_id = api.exec_create(self._container.id, words, stdin=True, user="0:0")["Id"]
        stream = api.exec_start(exec_id, socket=True)
        # It closes no socket of its own.
        with contextlib.closing(stream._sock), stream:
            stream._sock.sendall(given)
            for _, part in frames_iter(stream, tty=False):
                yield part
        if (code := api.exec_inspect(exec_id)["ExitCode"]) is not None:
            yield int(code)

    async def listen(self) -> socket.socket:
        """A socket on its loopback. Raises UnavailableError, UserError: the engine is another user's."""
        if not await self.runs():
            raise self.gone()
        pid = int(self._container.attrs["State"]["Pid"])
        return await listen_in(os.pidfd_open(pid), self.name, _network_of(pid), user=None)

    @override
    async def stop_processes(self) -> None:
        """Start the container again: its file system stays. Raises UnavailableError."""
        try:
            await self._engine.call(self._container.restart, timeout=0)
        except APIError as error:
            why = "it has ended" if isinstance(error, MissingError) else error
            raise self.gone(why) from error

    @override
    async def remove(self) -> None:
        api = self._engine.client.api
        try:
            await self._engine.call(api.remove_container, self.name, force=True, v=True)
        except APIError as error:  # 409: another process removes it
            if error.status_code not in (404, 409):
                raise

    @override
    async def runs(self) -> bool:
        if self.closed:
            return False
        try:
            await self._engine.call(self._container.reload)
        except MissingError:
            return False
        return bool(self._container.status == "running")


def _network_of(pid: int) -> int:
    """The namespaces that lead to the network of a container: of a rootless engine its user's, too."""
    with contextlib.suppress(OSError):
        own, its = (Path(f"/proc/{each}/ns/user").stat().st_ino for each in ("self", pid))
        return CLONE_NEWNET if own == its else CLONE_NEWNET | CLONE_NEWUSER
    return CLONE_NEWNET


def _tools() -> list[tuple[str, str]]:
    """Name in a container and path here of PROGRAMS and what they are linked with. Raises ConfigError."""
    found: dict[str, str] = {}
    for name in PROGRAMS:
        if (path := shutil.which(name)) is None:
            raise ConfigError(f"containers of podman and docker need {name} on this machine")
        found[name] = path
        told = subprocess.run(["ldd", path], capture_output=True, text=True, check=True).stdout
        for library in re.findall(r"(/\S+) \(0x", told):
            linked = Path(library).name
            found["ld.so" if linked.startswith("ld-") else linked] = library
    return sorted(found.items())


def main() -> None:
    """Wait for the end of stdin, which is the death of the owner; then remove its containers."""
    address, dead = sys.argv[1:]
    sys.stdin.buffer.read()
    ContainerEngine(address).remove(lambda label: label == dead)


if __name__ == "__main__":
    main()
