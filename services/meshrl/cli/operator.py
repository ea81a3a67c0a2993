"""An operator's questions to a queue: over gRPC while it runs, on its store when it does not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Protocol, TypeVar

from meshrl.cli.find_mesh import RETRY_S, Mesh
from meshrl.contract.types import Audit, StoredRun
from meshrl.launcher.address_book import run_lock
from meshrl.rpc.clients.operators import QueueAdminClient
from meshrl.rpc.queue_connection import build_store
from meshrl.transferqueue.admin import QueueAdmin, audit
from meshrl.transferqueue.queue import TransferQueue
from meshrl.transferqueue.store import Operation, Store

Answer = TypeVar("Answer")


class Operator(Protocol):
    """The methods about everything stored, of `QueueAdmin` and of its client."""

    def export(self) -> AsyncGenerator[Sequence[Operation], None]:
        """Everything that is stored, as of one commit."""
        ...

    async def verify(self) -> Audit:
        """Look at all of it."""
        ...


class RunKeeper(Protocol):
    """The methods about runs of `QueueAdmin` and of its client."""

    async def runs(self) -> Sequence[StoredRun]:
        """All runs."""
        ...

    async def remove_run(self, run: str, *, force: bool) -> StoredRun:
        """Delete one."""
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
            async with QueueAdminClient(mesh.queue, retry_s=RETRY_S) as client:
                return await question(client)
        recipe = mesh.stopped
        with run_lock(recipe.run.path):
            return await ask_store(build_store(recipe), question)

    return asyncio.run(ask())


def ask_runs(mesh: Mesh, question: Callable[[RunKeeper], Awaitable[Answer]]) -> Answer:
    """One conversation about the runs of a queue, running or not."""

    async def ask() -> Answer:
        if mesh.stopped is None:
            async with QueueAdminClient(mesh.queue, retry_s=RETRY_S) as client:
                return await question(client)
        recipe = mesh.stopped
        with run_lock(recipe.run.path):
            store = build_store(recipe)
            queue = await TransferQueue.open(store, samplers=[recipe.queue.sampler])
            try:
                return await question(QueueAdmin(queue, store))
            finally:
                await queue.close()

    return asyncio.run(ask())


async def audit_of(operator: Operator) -> Audit:
    """The question for an audit."""
    return await operator.verify()
