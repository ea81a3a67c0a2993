"""Boxes in memory, for tests of what holds them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from meshrl.rollout.containers.box import BoxLimits, Finished, Image


class StandInBox:
    """A box that knows whether it is open."""

    def __init__(self, backend: StandInBackend, name: str, row: str) -> None:
        self.backend, self.name, self.row = backend, name, row

    async def run(self, command: Sequence[str], **_: Any) -> Finished:
        return Finished(exit_code=0, output=b"", timed_out=False)

    async def close(self) -> None:
        await asyncio.sleep(0)
        self.backend.open.discard(self)


class StandInBackend:
    """Boxes in memory. `gate` holds up images and starts; `broken` images fail."""

    def __init__(self) -> None:
        self.open: set[StandInBox] = set()
        self.made: list[Image] = []
        self.most_open = self.most_starts = self.starts = self.count = 0
        self.broken: dict[Image, Exception] = {}
        self.gate = asyncio.Event()
        self.gate.set()

    async def prepare(self, image: Image) -> None:
        self.made.append(image)
        await self.busy()
        if image in self.broken:
            raise self.broken[image]

    async def start(self, image: Image, limits: BoxLimits, *, row: str) -> Any:
        await self.busy()
        self.count += 1
        box = StandInBox(self, f"box-{self.count}", row)
        self.open.add(box)
        self.most_open = max(self.most_open, len(self.open))
        return box

    async def busy(self) -> None:
        self.starts += 1
        self.most_starts = max(self.most_starts, self.starts)
        try:
            await asyncio.sleep(0)
            await self.gate.wait()
        finally:
            self.starts -= 1

    async def sweep(self) -> int:
        return 3

    async def close(self) -> None:
        pass
