"""The carrier shm, whose replicas open their end only while a gate is open: joiners that take long to be ready."""

from __future__ import annotations

import asyncio

from meshrl.weights.carrier import Channel, Link
from meshrl.weights.carriers import shm

gate = asyncio.Event()
waiting = asyncio.Event()


class Carrier(shm.Carrier):
    def channel(self, link: Link) -> Channel:
        return super().channel(link) if link.rank == 0 else GatedReader(link, self.memory)


class GatedReader(shm.ShmReader):
    async def open(self, deadline_s: float) -> None:
        if not gate.is_set():
            waiting.set()
        await gate.wait()
        await super().open(deadline_s)
