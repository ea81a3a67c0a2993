"""The parent's handle on a NCCL process: starts it, sends it requests with deadlines, kills it."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import logging
import os
import signal
import socket
from dataclasses import dataclass
from typing import Any

from meshrl.common import shared_buffers
from meshrl.common.process_guard import PARENT_VARIABLE
from meshrl.common.python_process import PYTHON
from meshrl.config.weights import NcclConfig
from meshrl.contract.errors import ConfigError, UnavailableError, from_detail
from meshrl.contract.ports import LentBucket
from meshrl.contract.types import Uint8
from meshrl.weights.nccl import messages
from meshrl.weights.waiting import within

logger = logging.getLogger(__name__)
_MODULE = "meshrl.weights.nccl.worker"
_BLOCKING = "NCCL_COMM_BLOCKING"
_ANSWER_S = 10.0
"""For answers that need no other rank."""
_START_S = 60.0
"""Importing torch and cupy, finding the GPU; pinning a version's memory."""
_GRACE_S = 2.0
"""Time for a process that missed its own deadline to abort and report it."""
_LEAVE_S = 3.0
_MOST_FAILED_LENT = 4
"""More than the ways by which one version is tried: two groups, and one channel of two ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Properties that all ranks must have in common."""

    library: str
    version: str


def environment(config: NcclConfig) -> dict[str, str]:
    """The process's environment.

    Raises:
        ConfigError: cupy is missing, or NCCL is configured not to block, which cupy does not support.
    """
    if config.library == "cupy" and importlib.util.find_spec("cupy") is None:
        raise ConfigError(
            "NCCL needs cupy, which is not installed here: pip install 'meshrl[nccl]' on machines with an NVIDIA "
            "GPU; elsewhere choose another weights.carrier, such as gloo, shm or disk"
        )
    merged = {**os.environ, **config.env}
    if merged.get(_BLOCKING, "1") == "0":
        raise ConfigError(
            f"{_BLOCKING}=0 is set, and cupy needs a NCCL whose calls block: unset it, or set it to 1"
        )
    # Set explicitly, so that no nccl.conf sets it otherwise.
    return {**merged, _BLOCKING: "1", PARENT_VARIABLE: str(os.getpid())}


class NcclProcess:
    """One process for one rank of one communicator. After any failure it is dead, and of no further use."""

    def __init__(self, config: NcclConfig) -> None:
        self._config = config
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._files: socket.socket | None = None
        self._attached: set[int] = set()
        """Regions of shared memory that it has mapped."""
        self._memory: Uint8 | None = None
        """Memory of a broadcast that has not ended well, reserved while the process may write there."""
        self._facts: Facts | None = None
        self._killed = False
        self.gpu = self.memory = ""
        """The GPU whose memory may be lent to it, and by whose handles; empty: none."""

    @property
    def pid(self) -> int | None:
        """None before `start`."""
        return self._process.pid if self._process else None

    @property
    def killed(self) -> bool:
        """`kill` was called."""
        return self._killed

    @property
    def alive(self) -> bool:
        """Whether it was started, was not killed, and is not known to have ended."""
        return self._process is not None and not self._killed and not self.ended

    @property
    def ended(self) -> bool:
        """Whether it was started and has exited."""
        return self._process is not None and self._process.returncode is not None

    async def start(self) -> None:
        """Run it; what it imports takes seconds, see `facts`."""
        ours, theirs = socket.socketpair()
        self._files, their_files = socket.socketpair()
        fds = (theirs.fileno(), their_files.fileno())
        config = self._config
        try:
            self._process = await asyncio.create_subprocess_exec(
                *PYTHON,
                _MODULE,
                "--socket",
                str(fds[0]),
                "--memory",
                str(fds[1]),
                "--library",
                config.library,
                "--device",
                str(config.device),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=2,  # NCCL_DEBUG writes to stdout, and the parent's stdout may be a protocol
                pass_fds=fds,
                env=environment(config),
            )
            self._reader, self._writer = await asyncio.open_unix_connection(sock=ours)
        except BaseException:
            ours.close()
            await self.kill_and_wait()
            raise
        finally:
            theirs.close()  # the child must hold the only copy, or its death would not close the socket
            their_files.close()

    async def facts(self) -> Facts:
        """The library and version that it loaded; the first call waits for its imports.

        Raises:
            ConfigError: it has no GPU, or no usable NCCL.
            UnavailableError: it ended.
        """
        if self._facts is None:
            answer = await self._receive(_START_S, "starting")
            self._facts = Facts(library=answer["library"], version=answer["version"])
        return self._facts

    async def unique_id(self) -> bytes:
        """A new communicator's id; this process must live until every rank has joined."""
        answer = await self._ask(_ANSWER_S, "making a unique id", do="unique_id")
        return bytes.fromhex(answer["unique_id"])

    async def join(self, size: int, unique_id: bytes, rank: int, deadline_s: float) -> None:
        """Join the other ranks and warm up. Kills the process past the deadline: nothing else ends NCCL's wait."""
        answer = await self._ask(
            deadline_s + _GRACE_S,
            f"joining as rank {rank} of {size}",
            do="join",
            size=size,
            unique_id=unique_id.hex(),
            rank=rank,
            deadline_s=deadline_s,
        )
        self.gpu, self.memory = str(answer.get("gpu", "")), str(answer.get("memory", ""))

    async def reach(self, bucket: LentBucket) -> None:
        """Have it open and close memory that another process has lent. Where it cannot, it continues."""
        what = "opening memory that was lent"
        frame = {"handle": bucket.handle, "nbytes": bucket.nbytes}
        answer = await self._ask(_ANSWER_S, what, do="reach", **frame)
        if answer["error"]:
            raise UnavailableError(f"NCCL: {what}: {answer['error']}")

    async def receive(self, bucket: LentBucket, deadline_s: float) -> str:
        """Broadcast from rank 0's memory into lent memory of another process; returns the digest there."""
        answer = await self._ask(
            deadline_s + _GRACE_S,
            f"a broadcast of {bucket.nbytes} bytes",
            do="receive",
            handle=bucket.handle,
            nbytes=bucket.nbytes,
            root=0,
            deadline_s=deadline_s,
        )
        return str(answer["digest"])

    async def broadcast(self, memory: Uint8, deadline_s: float) -> None:
        """Broadcast rank 0's `memory` into that of the other ranks, all of `meshrl.common.shared_buffers`."""
        found = shared_buffers.find(memory)
        assert found is not None, "memory that cannot be shared"
        region, at = found
        self._memory = memory
        await self._attach(region)
        await self._ask(
            deadline_s + _GRACE_S,
            f"a broadcast of {memory.nbytes} bytes",
            do="broadcast",
            number=region.number,
            at=at,
            nbytes=memory.nbytes,
            root=0,
            deadline_s=deadline_s,
        )
        self._memory = None

    def kill(self) -> None:
        """SIGKILL, whatever it does; never waits, idempotent. A wait for its answer raises UnavailableError."""
        self._killed = True
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
        if self._writer is not None:
            self._writer.close()
        if self._files is not None:
            self._files.close()

    async def kill_and_wait(self) -> None:
        """Kill it and wait for its end."""
        self.kill()
        if self._process is not None:
            await self._process.wait()

    async def leave(self) -> None:
        """Let it abort its communicator and end; kills it if it does not. Idempotent."""
        process = self._process
        if process is not None and self._writer is not None and not self._killed:
            self._writer.close()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LEAVE_S):
                    await process.wait()
        await self.kill_and_wait()

    async def _attach(self, region: shared_buffers.Region) -> None:
        """Have it map and pin a region, once, and let go of those that are no more."""
        for number in [each for each in self._attached if not shared_buffers.exists(each)]:
            self._attached.discard(number)
            await self._ask(_START_S, "unpinning memory", do="detach", number=number)
        if region.number in self._attached:
            return
        await self.facts()
        assert self._files is not None
        if not self._killed:
            with contextlib.suppress(OSError):  # it has ended: what is asked next says how
                socket.send_fds(self._files, [b"0"], [region.descriptor])
        frame = {"number": region.number, "nbytes": region.nbytes}
        await self._ask(_START_S, "pinning memory", do="attach", **frame)
        self._attached.add(region.number)

    async def _ask(self, limit_s: float, what: str, **frame: Any) -> messages.Frame:
        await self.facts()
        if self._writer is None or self._killed:
            raise UnavailableError(f"{what}: the NCCL process was killed")
        self._writer.write(messages.pack(frame))
        return await self._receive(limit_s, what)

    async def _receive(self, deadline_s: float, what: str) -> messages.Frame:
        """The answer, or the end of the process: a process that did not answer is never used again."""
        if self._reader is None:
            raise UnavailableError(f"{what}: the NCCL process is not started")
        try:
            answer = await within(messages.read(self._reader), deadline_s, f"NCCL: {what}")
            if answer is None:
                raise UnavailableError(f"NCCL: {what}: {await self._end_reason()}")
            if "failed" in answer:
                raise from_detail(answer["code"], f"NCCL: {answer['failed']}", {})
        except BaseException:
            self.kill()
            raise
        return answer

    async def _end_reason(self) -> str:
        if self._killed or self._process is None:
            return "its process was killed"
        code = await self._process.wait()
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return f"its process ended ({how})"


class NcclProcesses:
    """Starts processes, and keeps one spare."""

    def __init__(self, config: NcclConfig) -> None:
        """Raises ConfigError, see `environment`."""
        environment(config)  # fails early
        self._config = config
        self._spare: NcclProcess | None = None
        self._started: list[NcclProcess] = []
        self._starting: asyncio.Task[None] | None = None
        self._failed_lent = 0

    @property
    def may_be_lent(self) -> bool:
        """Whether memory may be lent: not after several such broadcasts failed in a row, as the host's may work."""
        return self._failed_lent < _MOST_FAILED_LENT

    def received_lent(self, *, well: bool) -> None:
        """Note that a broadcast into lent memory has ended."""
        self._failed_lent = 0 if well else self._failed_lent + 1
        if not well and self._failed_lent == _MOST_FAILED_LENT:
            logger.warning(
                "%d broadcasts into memory that the engine lends have failed in a row: from now on versions arrive on"
                " the host",
                _MOST_FAILED_LENT,
            )

    async def take(self) -> NcclProcess:
        """A started process: the spare one if it is still alive."""
        if self._starting is not None:
            # Not awaited directly: cancelling this call must not cancel the start for others.
            await asyncio.wait({self._starting})
        process, self._spare = self._spare, None
        if process is None or not process.alive:
            process = await self._start()
        return process

    def put_back(self, process: NcclProcess) -> None:
        """Keep a process that joined nothing as the spare one."""
        self._spare = process

    async def settle(self, deadline_s: float) -> None:
        """Return once nothing is left of any that was killed: until then it may write. Raises UnavailableError."""
        for process in self._started:
            if process.killed and not process.ended:
                await within(process.kill_and_wait(), deadline_s, "the end of a killed process")

    def prepare(self) -> None:
        """Start the next spare one in the background."""
        busy = self._starting is not None and not self._starting.done()
        if self._config.spare and self._spare is None and not busy:
            self._starting = asyncio.create_task(self._start_spare(), name="nccl-spare")

    async def close(self) -> None:
        """End all processes; idempotent."""
        if self._starting is not None:
            await asyncio.gather(self._starting, return_exceptions=True)
        for process in self._started:
            await process.kill_and_wait()
        self._started.clear()
        self._spare = None

    async def _start(self) -> NcclProcess:
        self._started = [each for each in self._started if not each.ended]
        process = NcclProcess(self._config)
        self._started.append(process)
        await process.start()
        return process

    async def _start_spare(self) -> None:
        try:
            self._spare = await self._start()
        except OSError as error:  # the next channel tries again, and reports it
            logger.warning("no spare NCCL process: %s", error)
