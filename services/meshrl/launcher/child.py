"""One supervised process: its start, its lines, its end. Nothing of it survives `sweep`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
from collections import deque
from collections.abc import Callable
from typing import TypeAlias

from meshrl.launcher.service import Service
from meshrl.rpc.parent_death import PARENT_VARIABLE

LineSink: TypeAlias = Callable[[str, str], None]
"""Takes (service name, one line)."""
ERROR_LINE = re.compile(r"^(error:|\w*(\.\w+)*(Error|Exception|Interrupt)\b)|\b(ERROR|CRITICAL)\b")
READ_BYTES = 1 << 16
LONGEST_LINE = 1 << 20
LINES_S = 2.0
"""How long the lines of an ended process may take; one that left its group may hold the pipe for ever."""


class Child:
    """A running process of `service`, in a session and process group of its own."""

    def __init__(self, service: Service, process: asyncio.subprocess.Process) -> None:
        self.service = service
        self.pid = process.pid
        self._process = process
        self._tail: deque[str] = deque(maxlen=200)
        self.started = asyncio.get_running_loop().time()
        self.ready_at: float | None = None
        self.done: asyncio.Task[int]

    @classmethod
    async def start(cls, service: Service, sink: LineSink) -> Child:
        """Start the process; its lines go to `sink` as they come.

        Raises:
            OSError: the program cannot be started.
        """
        env = {"OMP_NUM_THREADS": "1", **os.environ, **service.env}
        env |= {"PYTHONUNBUFFERED": "1", PARENT_VARIABLE: str(os.getpid())}
        # A pipe of our own: with PIPE, asyncio's `wait` waits for the pipe too, and a grandchild may hold that.
        lines, lines_in = os.pipe()
        try:
            process = await asyncio.create_subprocess_exec(
                *service.argv(),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=lines_in,
                stderr=asyncio.subprocess.STDOUT,
                env=env,
                start_new_session=True,
            )
        except BaseException:
            os.close(lines)
            raise
        finally:
            os.close(lines_in)
        child = cls(service, process)
        child.done = asyncio.create_task(child._live(lines, sink), name=f"{service.name}-process")
        return child

    @property
    def running(self) -> bool:
        """False once the process has ended and its lines are read."""
        return not self.done.done()

    @property
    def last_error(self) -> str:
        """The line that says best why the process ended."""
        lines = [line.strip() for line in self._tail if line.strip()]
        telling = [line for line in lines if ERROR_LINE.search(line)]
        return (telling or lines or ["it printed nothing"])[-1]

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process itself; harmless when it has ended."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    def sweep(self) -> None:
        """Kill the process and whatever it started and left behind."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    async def _live(self, lines: int, sink: LineSink) -> int:
        stream = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(stream), os.fdopen(lines, "rb")
        )
        reading = asyncio.create_task(self._read(stream, sink), name=f"{self.service.name}-lines")
        try:
            code = await self._process.wait()
            self.sweep()
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
                self._take(line, sink)
        if rest:
            self._take(rest, sink)

    def _take(self, raw: bytes, sink: LineSink) -> None:
        # A progress bar rewrites its line with \r: only what it shows last is worth a line.
        line = raw.decode(errors="replace").rstrip("\r").rpartition("\r")[2]
        self._tail.append(line)
        sink(self.service.name, line)
