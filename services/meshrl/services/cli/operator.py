"""An operator's conversation with a queue: over its door while it runs, on its store when it does not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Protocol, TypeVar

from meshrl.services.cli.mesh import PATIENCE_S, Mesh
from meshrl.services.up.book import run_lock
from meshrl.services.wires.queue_admin import QueueAdminWire
from meshrl.transferqueue import stores
from meshrl.transferqueue.audit import Audit, audit
from meshrl.transferqueue.store import Operation, Store

Answer = TypeVar("Answer")


class Operator(Protocol):
    """What `QueueAdmin` and its wire have in common."""

    def export(self) -> AsyncGenerator[Sequence[Operation], None]:
        """Everything that is stored, as of one commit."""
        ...

    async def verify(self) -> Audit:
        """Look at all of it."""
        ...


class _Stored:
    """A store that no queue serves: what is broken in it must not keep it from being looked at."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def export(self) -> AsyncGenerator[Sequence[Operation], None]:
        return self._store.export()

    async def verify(self) -> Audit:
        async with aclosing(self._store.export()) as pieces:
            return await audit(pieces)


async def ask_store(store: Store, question: Callable[[Operator], Awaitable[Answer]]) -> Answer:
    """One conversation with a store, opened and closed here."""
    try:
        await store.load()
        return await question(_Stored(store))
    finally:
        await store.close()


def ask_operator(mesh: Mesh, question: Callable[[Operator], Awaitable[Answer]]) -> Answer:
    """One conversation with the queue of `mesh`, running or not."""

    async def ask() -> Answer:
        if mesh.stopped is None:
            async with QueueAdminWire(mesh.queue, patience_s=PATIENCE_S) as wire:
                return await question(wire)
        recipe = mesh.stopped
        with run_lock(recipe.run.path):
            return await ask_store(stores.build(recipe.queue, recipe.queue_path), question)

    return asyncio.run(ask())
