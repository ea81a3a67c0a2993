"""Processes of a weight plane with random weights, that a test starts, commands and ends."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).with_name("weights_process.py")
BUCKETS = 4


class Process:
    """A trainer or a replica, with everything that it has reported."""

    def __init__(self, child: asyncio.subprocess.Process, name: str) -> None:
        self.child = child
        self.name = name
        self.events: list[dict[str, Any]] = []
        self._changed = asyncio.Condition()
        self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        assert self.child.stdout is not None
        async for line in self.child.stdout:
            async with self._changed:
                self.events.append(json.loads(line))
                self._changed.notify_all()

    async def until(self, condition: Callable[[], Any]) -> Any:
        async with self._changed:
            await self._changed.wait_for(condition)
        return condition()

    def all(self, key: str) -> list[Any]:
        return [event[key] for event in self.events if key in event]

    @property
    def fleet(self) -> dict[str, list[str]]:
        return (self.all("fleet") or [{}])[-1]

    def hashes(self, key: str) -> dict[str, list[str]]:
        return {event[key]: event["hashes"] for event in self.events if key in event}

    async def publish(self, step: int, **signal_at: float) -> None:
        assert self.child.stdin is not None
        self.child.stdin.write(json.dumps({"publish": step, **signal_at}).encode() + b"\n")
        await self.child.stdin.drain()

    async def arm(self, at: str, step: int, number: signal.Signals) -> None:
        """A trainer that will do this to itself."""
        assert self.child.stdin is not None
        order = {"arm": at, "step": step, "signal": number}
        self.child.stdin.write(json.dumps(order).encode() + b"\n")
        await self.child.stdin.drain()

    async def stopped(self) -> None:
        """Return once SIGSTOP has taken hold."""
        status = Path(f"/proc/{self.child.pid}/stat")
        while status.read_text().rpartition(")")[2].split()[0] != "T":  # noqa: ASYNC110, ASYNC240
            await asyncio.sleep(0.01)

    def signal(self, number: signal.Signals) -> None:
        self.child.send_signal(number)

    async def end(self) -> None:
        if self.child.returncode is None:
            self.child.kill()
        await self.child.wait()
        await self._reading


class Mesh:
    """Starts processes, and sees that none outlives the test."""

    def __init__(self, directory: Path, carrier: str, **config: object) -> None:
        self.directory = directory
        self.config: dict[str, object] = {
            "carrier": carrier,
            # A death breaks a connection: no deadline finds it. A busy machine must not be taken for one.
            "base_s": 60.0,
            "silence_s": 60.0,
            **config,
        }
        self.port = 0
        self.started: list[Process] = []

    async def start(self, role: str, *options: str) -> Process:
        child = await asyncio.create_subprocess_exec(
            sys.executable,
            str(SCRIPT),
            role,
            f"--config={json.dumps(self.config)}",
            f"--directory={self.directory}",
            f"--port={self.port}",
            *options,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        process = Process(child, role)
        self.started.append(process)
        return process

    async def trainer(self, epoch: int = 1) -> Process:
        trainer = await self.start("trainer", f"--epoch={epoch}")
        self.port = (await trainer.until(lambda: trainer.all("port")))[0]
        return trainer

    async def replica(self, name: str, *options: str) -> Process:
        return await self.start("replica", f"--name={name}", *options)

    async def end(self) -> None:
        for process in self.started:
            await process.end()
