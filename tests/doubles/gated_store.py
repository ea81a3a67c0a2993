"""A memory store whose commits can be delayed, counted and refused, like a slow disk and a full one."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from meshrl.contract.errors import MeshError
from meshrl.transferqueue.store import Operation
from meshrl.transferqueue.stores.memory import MemoryStore


class GatedStore(MemoryStore):
    def __init__(self) -> None:
        super().__init__()
        self.gate = asyncio.Event()
        self.gate.set()
        self.commits = 0
        self.refusal: MeshError | None = None
        self.unreadable: MeshError | None = None

    async def load(self) -> Sequence[tuple[bytes, bytes]]:
        if self.unreadable is not None:
            raise self.unreadable
        return await super().load()

    async def apply(self, operations: Sequence[Operation]) -> None:
        await self.gate.wait()
        self.commits += 1
        if self.refusal is not None:
            raise self.refusal
        await super().apply(operations)
