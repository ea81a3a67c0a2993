"""Containers of simulated rollout workers: the product's pool over a backend that takes virtual time.

A container dies with its worker's process, which is what a backend promises; with its row, which the pool does.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

from typing_extensions import override

from meshrl.contract.errors import UnavailableError
from meshrl.contract.types import Task, Uid
from meshrl.rollout.config import ContainersConfig
from meshrl.rollout.containers import pool
from meshrl.rollout.containers.box import BoxLimits, Image
from meshrl.rollout.containers.pool import Pool
from meshrl.rollout.ports import Generator, Program, Rollout
from meshrl.rollout.tokenizer import Tokenizer

IMAGES = [Image(name=f"image-{number}") for number in range(3)]


class SimulatedBackend:
    """The containers of one worker; one that outlives its row is a problem."""

    def __init__(self, draw: random.Random, problem: Callable[[str], None]) -> None:
        self._draw, self._problem = draw, problem
        self.rows: set[str] = set()
        """Rows that are played."""
        self._open: dict[_SimulatedBox, float] = {}
        """Containers, and when each was last seen with its row."""

    async def prepare(self, image: Image) -> None:
        await asyncio.sleep(self._draw.uniform(0.0, 10.0))
        if self._draw.random() < 0.2:
            raise UnavailableError("the engine does not answer")

    async def start(self, image: Image, limits: BoxLimits, *, row: str) -> Any:
        await asyncio.sleep(self._draw.uniform(0.0, 3.0))
        box = _SimulatedBox(self, row)
        self._open[box] = asyncio.get_running_loop().time()
        self.look()
        return box

    async def end(self, box: _SimulatedBox) -> None:
        await asyncio.sleep(self._draw.uniform(0.0, 0.5))
        self._open.pop(box, None)

    def look(self, *, over: bool = False) -> None:
        """Check containers that rows were given; at the end of the worker, all."""
        now = asyncio.get_running_loop().time()
        for box, seen in self._open.items():
            if not over and (not box.name or box.name in self.rows):
                self._open[box] = now
            elif over or now - seen > pool.CLOSE_S:
                self._problem(f"a container lives without its row {box.name}")

    async def sweep(self) -> int:
        return 0

    async def close(self) -> None:
        self.look(over=True)


class _SimulatedBox:
    def __init__(self, backend: SimulatedBackend, name: str) -> None:
        self.name, self._backend = name, backend

    async def close(self) -> None:
        await self._backend.end(self)


class InContainer(Program):
    """A program whose rows each have a container."""

    def __init__(
        self,
        inner: Program,
        boxes: int,
        backend: SimulatedBackend,
        kind: type[Pool],
    ) -> None:
        self.pool = kind(backend, ContainersConfig(boxes=boxes, starts=2, warm=1))
        self._inner, self._backend = inner, backend

    @override
    async def __call__(
        self, task: Task, uid: Uid, engine: Generator, tokenizer: Tokenizer
    ) -> Rollout:
        row = f"{uid}"
        self._backend.rows.add(row)
        try:
            async with self.pool.box(IMAGES[len(task.task_id) % 3], row=row):
                return await self._inner(task, uid, engine, tokenizer)
        finally:
            self._backend.rows.discard(row)
