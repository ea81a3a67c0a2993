"""A system under measurement, seen from outside: its server, its four clients, their clocks and their memory.

    server (1, with what it needs)   producer 0   producer 1   annotator   consumer

Linux only: the CPU clock and the memory of other processes are read from the kernel, alike for both systems.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import uvloop

HERE = Path(__file__).resolve().parent
ROLES = (("producer", 0), ("producer", 1), ("annotator", 0), ("consumer", 0))
LIMIT = 1 << 26
"""Bytes of one line: what arrived, or all latencies."""


class ChildFailed(Exception):
    """A process of the system ended or reported an error."""


def run(main: Coroutine[Any, Any, None]) -> None:
    """To its end; a failure is one line, and whatever ends it, no process stays behind."""

    async def guarded() -> None:
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        await main

    try:
        uvloop.run(guarded())
    except ChildFailed as error:
        sys.exit(f"error: {error}")
    except (KeyboardInterrupt, asyncio.CancelledError):
        sys.exit("interrupted")


def cpu_s(pid: int) -> float:
    """CPU seconds of all threads of a process; see clock_getcpuclockid(3)."""
    return time.clock_gettime(~pid << 3 | 2)


def memory(pid: int, name: str = "VmRSS") -> int:
    """Bytes: VmRSS now, VmHWM at most."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) << 10
    raise ValueError(f"process {pid} has no {name}")


def total_cpu_s(pids: Sequence[int]) -> float:
    """Processor seconds of the processes that still live."""
    total = 0.0
    for pid in pids:
        with suppress(OSError):
            total += cpu_s(pid)
    return total


class Child:
    """A process that is spoken to in lines of JSON."""

    def __init__(self, name: str, process: asyncio.subprocess.Process) -> None:
        self.name = name
        self.pid = process.pid
        self._process = process

    @classmethod
    async def start(cls, name: str, command: Sequence[str], **environment: str) -> Child:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **environment},
            limit=LIMIT,
        )
        return cls(name, process)

    def tell(self, **order: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write((json.dumps(order) + "\n").encode())

    async def hear(self) -> dict[str, Any]:
        """The next line. Raises ChildFailed."""
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        answer: dict[str, Any] = json.loads(line) if line else {"error": "ended"}
        if "error" in answer:
            raise ChildFailed(f"{self.name}: {answer['error']}")
        return answer

    async def close(self, grace_s: float = 20.0) -> None:
        """Hang up; a process that does not end is killed."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            await asyncio.wait_for(self._process.wait(), grace_s)
        except TimeoutError:
            self.kill()
            await self._process.wait()

    def kill(self) -> None:
        """kill -9."""
        with suppress(ProcessLookupError):
            self._process.kill()


@dataclass
class Pass:
    """The cost of one pass of the whole work."""

    wall_s: float
    cpu_s: dict[str, float]
    """Processor seconds by part: server, clients, framework."""
    server_rss: int
    put_ms: list[float]
    take_ms: list[float]
    arrived: list[int] = field(repr=False)
    """The digest of each row, in order."""
    lengths: list[list[int]] = field(default_factory=list, repr=False)
    """Tokens of the rows of each batch."""


class System:
    """One running system: `async with System(...) as system: await system.run("p1", groups=512)`."""

    def __init__(
        self,
        server: Sequence[str],
        client: Sequence[str],
        seed: int,
        tuning: dict[str, Any],
        parts: dict[str, list[int]] | None = None,
    ) -> None:
        """Commands; `client` lacks the roles and may name "{address}", which the server tells."""
        self._commands = (server, client)
        self._seed, self._tuning = seed, tuning
        self.parts = dict(parts or {})
        """Process ids: server, clients, framework."""
        self.server: Child | None = None
        self.clients: dict[str, Child] = {}
        self.address = ""

    async def __aenter__(self) -> Self:
        server, client = self._commands
        try:
            self.server = await Child.start("server", server)
            heard = await self.server.hear()
            for part in ("server", "framework"):
                self.parts[part] = [*self.parts.get(part, []), *heard.get(part, [])]
            self.address = heard.get("address", "")
            for role, number in ROLES:
                where = [self.address if word == "{address}" else word for word in client]
                rest = [role, str(number), *where[2:], str(self._seed), json.dumps(self._tuning)]
                name = f"{role} {number}"
                self.clients[name] = await Child.start(name, [*where[:2], *rest])
            for child in self.clients.values():
                await child.hear()
        except BaseException:
            await self._close()
            raise
        self.parts["clients"] = [child.pid for child in self.clients.values()]
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._close()

    async def _close(self) -> None:
        await asyncio.gather(*(child.close() for child in self.clients.values()))
        if self.server is not None:
            await self.server.close()

    async def run(self, name: str, **order: int) -> Pass:
        """One pass, from the first row offered to the last row consumed. Raises ChildFailed."""
        consumer = self.clients["consumer 0"]
        await self.prepare(name, **order)
        before = {part: total_cpu_s(pids) for part, pids in self.parts.items()}
        for child in self.clients.values():
            child.tell(do="pass")
        ended = await self.until_done(consumer)
        spent = {part: total_cpu_s(pids) - before[part] for part, pids in self.parts.items()}
        rss = sum(memory(pid, "VmHWM") for pid in self.parts["server"])
        reports = [await self.stopped(child) for child in self.clients.values()]
        consumer.tell(do="verify")
        found = await consumer.hear()
        began = min(report["began"] for report in reports[:2])
        puts = [ms for report in reports[:2] for ms in report["ms"]]
        return Pass(ended - began, spent, rss, puts, reports[3]["ms"], **found)

    async def prepare(self, name: str, **order: int) -> None:
        """Make rows, open the run: what the clock does not see."""
        for child in reversed(self.clients.values()):  # the consumer opens the run
            child.tell(do="prepare", name=name, **order)
            await child.hear()

    async def until_done(self, awaited: Child | None) -> float:
        """When `awaited` was done; for ever without one. The failure of anybody is heard at once."""
        hearing = {asyncio.create_task(child.hear()): child for child in self.clients.values()}
        try:
            while hearing:
                done, _ = await asyncio.wait(hearing, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    child, answer = hearing.pop(task), task.result()
                    if child is awaited:
                        return float(answer["at"])
        finally:
            for task in hearing:
                task.cancel()
            await asyncio.gather(*hearing, return_exceptions=True)

    async def stopped(self, child: Child) -> dict[str, Any]:
        """End its pass; its report."""
        child.tell(do="stop")
        answer = await child.hear()
        while "done" in answer:  # it came to an end by itself, between two looks
            answer = await child.hear()
        return answer
