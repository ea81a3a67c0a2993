"""The processes of `up`: one service's, with its log lines and its end, and the watchdog that outlives `up`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
from collections import deque
from collections.abc import Awaitable, Callable
from typing import TypeAlias

from meshrl.common import process_guard
from meshrl.launcher.preloading import (
    ForkedProcess,
    PreloadError,
    Preloading,
    service_environment,
)
from meshrl.launcher.service import Service

LineSink: TypeAlias = Callable[[str, str], None]
"""Takes (service name, one line)."""
ERROR_LINE = re.compile(r"^(error:|\w*(\.\w+)*(Error|Exception|Interrupt)\b)|\b(ERROR|CRITICAL)\b")
READ_BYTES = 1 << 16
LONGEST_LINE = 1 << 20
LAUNCHER_S = 10.0
"""How long a launcher may take to end what it started elsewhere."""
LINES_S = 2.0
"""How long to read the last lines of an ended process: a grandchild that left the group may keep the pipe open."""


class ServiceProcess:
    """A running process of `service`, in a session and process group of its own."""

    def __init__(
        self,
        service: Service,
        process: asyncio.subprocess.Process | ForkedProcess,
        stdin: int | None = None,
    ) -> None:
        self.service = service
        self._input = stdin
        """Our end of what a launcher passes on to a service elsewhere, until it is closed."""
        self.pid = process.pid
        self._process = process
        self._tail: deque[str] = deque(maxlen=200)
        self.started = asyncio.get_running_loop().time()
        self.ready_at: float | None = None
        self._interrupted = False
        self.done: asyncio.Task[int]

    @classmethod
    async def start(
        cls, service: Service, sink: LineSink, preloading: Preloading | None = None
    ) -> ServiceProcess:
        """Start the process, as a fork of a preloader if it can be; its lines go to `sink` as they come.

        Raises:
            OSError: the program cannot be started.
        """
        # A pipe of our own: with PIPE, asyncio's `wait` waits for the pipe too, and a grandchild may hold that.
        lines, lines_in = os.pipe()
        stdin, stdin_out = os.pipe() if service.elsewhere else (None, None)
        try:
            process = await _fork(service, sink, preloading, lines_in) or (
                await asyncio.create_subprocess_exec(
                    *service.argv,
                    stdin=asyncio.subprocess.DEVNULL if stdin is None else stdin,
                    stdout=lines_in,
                    stderr=asyncio.subprocess.STDOUT,
                    env=service_environment(service.env),
                    start_new_session=True,
                )
            )
        except BaseException:
            os.close(lines)
            if stdin_out is not None:
                os.close(stdin_out)
            raise
        finally:
            os.close(lines_in)
            if stdin is not None:
                os.close(stdin)
        running = cls(service, process, stdin_out)
        running.done = asyncio.create_task(
            running._live(lines, sink), name=f"{service.name}-process"
        )
        return running

    @property
    def running(self) -> bool:
        """False once the process has ended and its lines are read."""
        return not self.done.done()

    @property
    def last_line(self) -> str:
        """Its last line of output."""
        return next((line.strip() for line in reversed(self._tail) if line.strip()), "nothing")

    @property
    def last_error(self) -> str:
        """The line that says best why the process ended."""
        lines = [line.strip() for line in self._tail if line.strip()]
        errors = [line for line in lines if ERROR_LINE.search(line)]
        return (errors or lines or ["it printed nothing"])[-1]

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process itself; harmless when it has ended."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    def drain(self) -> None:
        """Ask the service to drain; harmless when it has ended."""
        if self.service.elsewhere:
            self._end_input()
        else:
            self.signal(signal.SIGTERM)

    def kill_group(self) -> None:
        """Kill the process and everything left in its process group."""
        self._end_input()
        if self.service.elsewhere and self._process.returncode is None and not self._interrupted:
            # A launcher that is killed cannot end what it started.
            self._interrupted = True
            self.signal(signal.SIGINT)
            asyncio.get_running_loop().call_later(LAUNCHER_S, self.signal, signal.SIGKILL)
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def _end_input(self) -> None:
        if self._input is not None:
            os.close(self._input)
            self._input = None

    async def _live(self, lines: int, sink: LineSink) -> int:
        stream = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(stream), os.fdopen(lines, "rb")
        )
        reading = asyncio.create_task(self._read(stream, sink), name=f"{self.service.name}-lines")
        try:
            code = await self._process.wait()
            self.kill_group()
            await asyncio.wait({reading}, timeout=LINES_S)
        finally:
            reading.cancel()
            transport.close()
        return code

    async def _read(self, stream: asyncio.StreamReader, sink: LineSink) -> None:
        rest = b""
        while chunk := await stream.read(READ_BYTES):
            *lines, rest = (rest + chunk).split(b"\n")
            if len(rest) > LONGEST_LINE:
                lines, rest = [*lines, rest], b""
            for line in lines:
                self._add_line(line, sink)
        if rest:
            self._add_line(rest, sink)

    def _add_line(self, raw: bytes, sink: LineSink) -> None:
        # A progress bar rewrites its line with \r: only what it shows last is worth a line.
        line = raw.decode(errors="replace").rstrip("\r").rpartition("\r")[2]
        self._tail.append(line)
        sink(self.service.name, line)


StartProcess: TypeAlias = Callable[
    [Service, LineSink, Preloading | None], Awaitable[ServiceProcess]
]
"""As `ServiceProcess.start`."""


async def _fork(
    service: Service, sink: LineSink, preloading: Preloading | None, lines: int
) -> ForkedProcess | None:
    """A fork that runs `service`; None where no preloader can be used, with one log line for each."""
    if preloading is None:
        return None
    env = service_environment(service.env)
    try:
        return await preloading.fork(service.preload, service.argv, env, lines)
    except PreloadError as error:
        if preloading.first_loss(service.preload):
            sink("up", f"services start without the preloader {service.preload}: {error}")
        return None


class Watchdog:
    """A process that outlives this one, and kills all listed process groups when this one dies."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._groups: set[int] = set()

    def __enter__(self) -> Watchdog:
        self._process = subprocess.Popen(
            process_guard.watchdog_command(),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        return self

    def __exit__(self, *raised: object) -> None:
        assert self._process is not None and self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()

    def add(self, group: int) -> None:
        """Kill this process group if the supervisor dies."""
        self._groups.add(group)
        self._send(f"+{group}\n")

    def remove(self, group: int) -> None:
        """Remove a group that has ended."""
        if group in self._groups:
            self._groups.discard(group)
            self._send(f"-{group}\n")

    def _send(self, line: str) -> None:
        assert self._process is not None and self._process.stdin is not None
        # The watchdog may have been killed: PR_SET_PDEATHSIG still covers the children themselves.
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(line.encode())
            self._process.stdin.flush()
