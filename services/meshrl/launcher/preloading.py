"""The preloaders as `up` sees them: started first, asked for a fork at each start, not needed for anything.

`up` starts a service by exec where its preloader has failed or has died, and where the service's environment differs
from the preloader's in more than MESHRL_ variables and the choice of GPUs: torch, OpenMP and the loader read theirs
at import, and CUDA when it is initialised, which no preloader does.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import IO, Literal, TypeAlias

from meshrl.common.process_guard import PARENT_VARIABLE
from meshrl.common.python_process import PYTHON
from meshrl.launcher.preloader import LIGHT, NAME, PADDING, READY, REQUEST_BYTES, TORCH

Kind: TypeAlias = Literal["light", "torch"]
KINDS: tuple[Kind, ...] = ("light", "torch")
MODULES: Mapping[Kind, Sequence[str]] = {"light": LIGHT, "torch": TORCH}
CHANGEABLE = ("MESHRL_", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")
NO_THREADS = {
    "OMP_NUM_THREADS": "1",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
    "GRPC_ENABLE_FORK_SUPPORT": "0",
}
"""Defaults of a service, whose imports would start threads: numpy, and pyarrow, which comes with scikit-learn's.
And gRPC's handlers of forks aborted 3 of 97 processes of boxes, which uvloop forks, before they were any."""
PR_SET_CHILD_SUBREAPER = 36
READY_S = 120.0
"""How long the imports may take before services are started without them."""
FORK_S = 30.0
LONGEST_END_S = 5.0
LAST_LINE_BYTES = 4096


class PreloadError(Exception):
    """A preloader cannot be used; the text says why."""


def service_environment(more: Mapping[str, str]) -> dict[str, str]:
    """The environment of a process that `up` starts."""
    return {**NO_THREADS, **os.environ, **more, PARENT_VARIABLE: str(os.getpid())}


class ForkedProcess:
    """A child that this process adopted; the methods are those of `asyncio.subprocess.Process`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        loop = asyncio.get_running_loop()
        self._descriptor = os.pidfd_open(pid)
        self._ended: asyncio.Future[int] = loop.create_future()
        loop.add_reader(self._descriptor, self._reap)

    def send_signal(self, number: signal.Signals) -> None:
        """Raises ProcessLookupError once it has ended."""
        os.kill(self.pid, number)

    async def wait(self) -> int:
        """Its exit code, or minus the number of the signal that killed it."""
        return await asyncio.shield(self._ended)

    def _reap(self) -> None:
        asyncio.get_running_loop().remove_reader(self._descriptor)
        os.close(self._descriptor)
        _, status = os.waitpid(self.pid, 0)
        self.returncode = os.waitstatus_to_exitcode(status)
        self._ended.set_result(self.returncode)


class Preloader:
    """One process of `preloader.py`, at the other end of a socket."""

    def __init__(self, control: socket.socket, output: IO[bytes]) -> None:
        control.setblocking(False)
        self._control = control
        self._output = output
        self._getting_ready: asyncio.Task[None] | None = None
        self.lost = False
        """Whether it was reported as unusable."""

    async def until_ready(self) -> None:
        """Return when its imports are done. Raises PreloadError when they failed, or it died."""
        if self._getting_ready is None:
            self._getting_ready = asyncio.create_task(self._until_ready(), name="preloader")
        await asyncio.shield(self._getting_ready)

    async def fork(self, argv: Sequence[str], env: Mapping[str, str], lines: int) -> int:
        """The process id of a fork that runs `argv` and prints to `lines`.

        It is a child of this process if PR_SET_CHILD_SUBREAPER is set.

        Raises:
            PreloadError: there is none.
        """
        await self.until_ready()
        request = json.dumps({"argv": argv, "env": env, "parent": os.getpid()}).encode()
        if len(request) > REQUEST_BYTES:
            raise PreloadError("the command line is too long")
        try:
            socket.send_fds(self._control, [request], [lines])
        except OSError as error:
            raise self._ended() from error
        pid = int(await self._receive(FORK_S))
        if pid == 0:
            raise PreloadError("this machine can fork no more processes now")
        return pid

    async def _until_ready(self) -> None:
        if await self._receive(READY_S) != READY:
            raise self._ended()

    async def _receive(self, wait_s: float) -> bytes:
        try:
            async with asyncio.timeout(wait_s):
                answer = await asyncio.get_running_loop().sock_recv(self._control, 64)
        except TimeoutError as error:
            self._control.close()  # a late answer would be taken for the next one
            raise PreloadError(f"no answer for {wait_s:.0f} s") from error
        except OSError as error:
            raise self._ended() from error
        if not answer:
            raise self._ended()
        return answer

    def _ended(self) -> PreloadError:
        size = os.fstat(self._output.fileno()).st_size
        tail = os.pread(self._output.fileno(), LAST_LINE_BYTES, max(0, size - LAST_LINE_BYTES))
        lines = tail.decode(errors="replace").split("\n")
        said = [line.strip() for line in lines if line.strip()]
        return PreloadError(said[-1].removeprefix("error: ") if said else "it has ended")


class Preloading:
    """The preloaders of one `up`."""

    def __init__(self, env: Mapping[str, str], preloaders: Mapping[Kind, Preloader]) -> None:
        self._env = env
        self._preloaders = preloaders
        self._one_fork_at_a_time = asyncio.Lock()

    async def until_ready(self, kind: Kind) -> None:
        """Return when the preloader `kind` can fork, or never will."""
        with contextlib.suppress(PreloadError):
            await self._preloaders[kind].until_ready()

    async def fork(
        self, kind: Kind, argv: Sequence[str], env: Mapping[str, str], lines: int
    ) -> ForkedProcess:
        """A fork of `kind` that runs `argv`; it prints to `lines`.

        Raises:
            PreloadError: there is none, and why.
        """
        changed = {name: value for name, value in env.items() if self._env.get(name) != value}
        # up's own number is the same, but the preloader has taken it out of its environment.
        changed[PARENT_VARIABLE] = env[PARENT_VARIABLE]
        other = [name for name in changed if not name.startswith(CHANGEABLE)]
        if other := sorted({*other, *(self._env.keys() - env.keys())}):
            raise PreloadError(f"the service has another {other[0]}")
        if tuple(argv[: len(PYTHON)]) != PYTHON:
            raise PreloadError(f"it is not a module of this Python: {' '.join(argv)}")
        forking = asyncio.create_task(self._fork(kind, argv, changed, lines), name="fork")
        try:
            return await asyncio.shield(forking)
        except asyncio.CancelledError:
            # The fork may exist already, and nobody else knows it.
            with contextlib.suppress(PreloadError, ProcessLookupError):
                (await forking).send_signal(signal.SIGKILL)
            raise

    def first_loss(self, kind: Kind) -> bool:
        """True at the first report that the preloader `kind` cannot be used."""
        preloader = self._preloaders[kind]
        first, preloader.lost = not preloader.lost, True
        return first

    async def _fork(
        self, kind: Kind, argv: Sequence[str], env: Mapping[str, str], lines: int
    ) -> ForkedProcess:
        preloader = self._preloaders[kind]
        await preloader.until_ready()
        async with self._one_fork_at_a_time:
            # Only for so long: the orphans of services are init's to reap.
            _adopt_orphans(True)
            try:
                return ForkedProcess(await preloader.fork(argv, env, lines))
            finally:
                _adopt_orphans(False)


@contextmanager
def preloading(
    enabled: bool, modules: Mapping[Kind, Sequence[str]] = MODULES
) -> Iterator[Preloading | None]:
    """Start the preloaders, and end them at the end of the body. None where they are not wanted or not possible.

    Args:
        enabled: False starts nothing.
        modules: What each preloader imports; the one of torch imports the first one of the light one before.
    """
    if not enabled or not _possible():
        yield None
        return
    env = service_environment({})
    pairs = {kind: socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for kind in KINDS}
    (light, light_end), (torch, torch_end) = pairs["light"], pairs["torch"]
    with tempfile.TemporaryFile() as output, light, torch:
        module_lists = [",".join(modules[kind]) for kind in KINDS]
        command = [
            *NAME,
            str(torch_end.fileno()),
            *module_lists,
            PADDING,
        ]
        process = subprocess.Popen(
            command,
            stdin=light_end.fileno(),
            stdout=output,
            stderr=output,
            env=env,
            pass_fds=[torch_end.fileno()],
            start_new_session=True,
        )
        light_end.close()
        torch_end.close()
        try:
            yield Preloading(
                env, {"light": Preloader(light, output), "torch": Preloader(torch, output)}
            )
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            # The second one is no child of ours: its end of the socket says when it is gone.
            with contextlib.suppress(OSError):
                torch.settimeout(LONGEST_END_S)
                while torch.recv(1):
                    pass


def _possible() -> bool:
    """Linux 5.3 or later, which has descriptors of processes."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):
        return False
    return True


def _adopt_orphans(adopt: bool) -> None:
    """Become the parent of descendants whose parent ends; or leave them to init again."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, int(adopt), 0, 0, 0)
