"""A queue and a reward service as processes of their own, which can be killed and started again."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from meshrl.launcher.address_book import ServiceAddress, free_port
from meshrl.launcher.service import is_serving
from meshrl.rpc import credentials


@dataclass
class Service:
    """One service of `recipe`, on the same port after each start."""

    kind: str
    recipe: Path
    options: tuple[str, ...] = ()
    port: int = field(default_factory=lambda: free_port("127.0.0.1"))
    process: asyncio.subprocess.Process | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def start(self) -> None:
        """Serving when this returns."""
        command = ["-m", "meshrl.cli", "serve", self.kind, str(self.recipe)]
        with (self.recipe.parent / f"{self.kind}.log").open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                sys.executable,
                *command,
                "--port",
                str(self.port),
                *self.options,
                stdout=log,
                stderr=log,
            )
        entry = ServiceAddress(kind=self.kind, host="127.0.0.1", port=self.port, metrics_port=0)
        async with asyncio.timeout(120):
            while not await is_serving(entry):
                assert self.process.returncode is None, self.output
                await asyncio.sleep(0.02)
        credentials.use_run_directory(Path(yaml.safe_load(self.recipe.read_text())["run"]["dir"]))

    async def kill(self) -> None:
        """kill -9."""
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        await self.process.wait()

    @property
    def output(self) -> str:
        return (self.recipe.parent / f"{self.kind}.log").read_text()[-4000:]


@asynccontextmanager
async def serving(*services: Service) -> AsyncIterator[None]:
    """All of them, in order; ended in the other order. Meanwhile this process presents their run's credential."""
    before = credentials.in_use()
    try:
        for service in services:
            await service.start()
        yield
    finally:
        credentials.use(before)
        for service in reversed(services):
            if service.process is not None and service.process.returncode is None:
                service.process.terminate()
                await asyncio.wait_for(service.process.wait(), 120)


def write_recipe(directory: Path, *, groups: int, group_size: int, **reward: Any) -> Path:
    """A run without a model: rows are answered by the test."""
    path = directory / "recipe.yaml"
    sections = {
        "run": {"name": "train", "dir": str(directory / "run")},
        "model": {"path": "not-on-this-machine"},
        "data": {"train_batch_size": groups},
        "rollout": {"n": group_size},
        "actor": {"use_kl_loss": False},
        "queue": {"max_attempts": 10, "lease_ttl_s": 2, "durability": "none"},
        "reward": reward,
    }
    path.write_text(yaml.safe_dump(sections))
    return path
