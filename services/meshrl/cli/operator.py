"""An operator's questions to a queue: over gRPC while it runs, on its store when it does not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from functools import partial
from typing import Protocol, TypeVar

from meshrl.cli.find_mesh import RETRY_S, Mesh
from meshrl.contract.errors import UserError
from meshrl.launcher.address_book import run_lock
from meshrl.rpc.clients.queue_admin import QueueAdminClient
from meshrl.rpc.queue_connection import build_store, connect_queue
from meshrl.transferqueue.admin import QueueAdmin
from meshrl.transferqueue.operations.audit import Audit, audit
from meshrl.transferqueue.operations.removal import StoredRun
from meshrl.transferqueue.queue import TransferQueue
from meshrl.transferqueue.sharding import ShardedQueue, total_ledger
from meshrl.transferqueue.store import Operation, Store

Answer = TypeVar("Answer")
Answer_co = TypeVar("Answer_co", covariant=True)


class Operator(Protocol):
    """What `QueueAdmin` and its client have in common."""

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


class Question(Protocol[Answer_co]):
    """What is asked of each shard."""

    def __call__(self, operator: Operator, number: int) -> Awaitable[Answer_co]:
        """The answer of the shard `number`."""
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


def ask_operator(mesh: Mesh, question: Question[Answer]) -> list[Answer]:
    """One conversation with each shard of the queue of `mesh`, by number; running or not."""

    async def ask() -> list[Answer]:
        answers: list[Answer] = []
        if mesh.stopped is None:
            for number, address in enumerate(await _all_shards(mesh.queue)):
                async with QueueAdminClient(address, retry_s=RETRY_S) as client:
                    answers.append(await question(client, number))
            return answers
        recipe = mesh.stopped
        with run_lock(recipe.run.path):
            for number in range(recipe.queue.shards):
                store = build_store(recipe, number)
                ask_shard = partial(question, number=number)
                answers.append(await ask_store(store, ask_shard))
        return answers

    return asyncio.run(ask())


def ask_runs(mesh: Mesh, question: Callable[[RunKeeper], Awaitable[Answer]]) -> Answer:
    """One conversation about the runs of a queue, running or not. Raises UserError for one of several processes."""
    if shards_of(mesh) > 1:
        raise UserError(
            "a run of several queue processes cannot be removed from them: remove its directory, and the queues'"
        )

    async def ask() -> Answer:
        if mesh.stopped is None:
            async with QueueAdminClient(mesh.queue, retry_s=RETRY_S) as client:
                return await question(client)
        recipe = mesh.stopped
        with run_lock(recipe.run.path):
            store = build_store(recipe, 0)
            queue = await TransferQueue.open(store, samplers=[recipe.queue.sampler])
            try:
                return await question(QueueAdmin(queue, store))
            finally:
                await queue.close()

    return asyncio.run(ask())


def shards_of(mesh: Mesh) -> int:
    """How many processes the queue is, or was."""
    if mesh.stopped is not None:
        return mesh.stopped.queue.shards
    return len(asyncio.run(_all_shards(mesh.queue)))


async def _all_shards(addresses: str) -> Sequence[str]:
    """The addresses given, and those of shards that were added meanwhile."""
    async with connect_queue(addresses, retry_s=RETRY_S) as queue:
        if isinstance(queue, ShardedQueue):
            return await queue.addresses()
    return [addresses.strip()]


def verify_all(mesh: Mesh) -> Audit:
    """Audit every shard."""

    async def ask(operator: Operator, number: int) -> Audit:
        return await operator.verify()

    return merged(ask_operator(mesh, ask))


def merged(audits: Sequence[Audit]) -> Audit:
    """One audit of all shards."""
    if len(audits) == 1:
        return audits[0]
    names = dict.fromkeys(name for one in audits for name in one.ledgers)
    return Audit(
        ledgers={
            name: total_ledger([one.ledgers[name] for one in audits if name in one.ledgers])
            for name in names
        },
        records=sum(one.records for one in audits),
        values=sum(one.values for one in audits),
        nbytes=sum(one.nbytes for one in audits),
        problems=[
            f"shard {number}: {problem}"
            for number, one in enumerate(audits)
            for problem in one.problems
        ],
    )
