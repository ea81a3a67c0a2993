"""Payload of a queue on the same host goes through memory that the client lends, and inline wherever it cannot."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshrl.contract.codec.arena import FOLDER, Arena, Lent
from meshrl.contract.codec.lending import ANSWER_BYTES, Borrower, referred
from meshrl.contract.errors import UserError
from meshrl.rpc.clients import QueueClient
from meshrl.rpc.runtime import GrpcServer, ServerSettings
from meshrl.rpc.servicers import QueueServicer
from meshrl.transferqueue import stores
from meshrl.transferqueue.config import QueueConfig
from meshrl.transferqueue.queue import TransferQueue

from ..contract.queue_actors import Actors, rollout_of, spec, tasks

LENT_BYTES = 3 * ANSWER_BYTES


async def produce(actors: Actors, count: int, start: int = 0) -> None:
    await actors.feed(tasks(count, start))
    await actors.work()


@pytest.fixture
def references(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The arena of every message whose frames a queue has got by reference."""
    found: list[bytes] = []
    fields = Borrower.fields

    def spied(self: Borrower, frame: Any) -> Any:
        if (where := referred(frame)) is not None:
            found.append(where[0])
        return fields(self, frame)

    monkeypatch.setattr(Borrower, "fields", spied)
    return found


@asynccontextmanager
async def served(path: Path, port: int = 0) -> AsyncIterator[GrpcServer]:
    queue = await TransferQueue.open(stores.build(QueueConfig(), path))
    settings = ServerSettings(port=port, drain_grace_s=1)
    async with GrpcServer(settings, [QueueServicer(queue)]) as server:
        yield server
    await queue.close()


@pytest.fixture
def arenas(monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """Tells which of the arenas that the test has made are still there."""
    made: list[str] = []
    create = Arena.create

    def spied(size: int) -> Arena:
        arena = create(size)
        made.append(arena.offer.name)
        return arena

    monkeypatch.setattr(Arena, "create", spied)
    return lambda: [name for name in made if (FOLDER / name).exists()]


async def test_rows_go_through_lent_memory_and_nothing_of_it_stays(
    tmp_path: Path, references: list[bytes], arenas: Callable[[], list[str]]
) -> None:
    async with served(tmp_path) as server:
        async with QueueClient(server.address, shared_memory_bytes=LENT_BYTES) as wire:
            actors = Actors(wire)
            await actors.start(spec())
            await produce(actors, 2)
            assert len(arenas()) == 1
            assert len(set(references)) == 1, "no frame came by reference"
            batch = await actors.take(0)
            rows = await wire.fetch("run", [row.uid for row in batch.rows], ["tokens"])
            assert [row["tokens"].tolist() for row in rows] == [list(range(6))] * 4
        assert not arenas()


async def test_a_queue_that_is_started_again_reads_the_same_arena(
    tmp_path: Path, references: list[bytes], arenas: Callable[[], list[str]]
) -> None:
    async with served(tmp_path) as first:
        wire = QueueClient(first.address, shared_memory_bytes=LENT_BYTES)
        actors = Actors(wire)
        await actors.start(spec())
        await produce(actors, 1)
    seen = len(references)
    async with served(tmp_path, first.port), wire:
        await produce(actors, 1, start=1)
    assert len(references) > seen and len(set(references)) == 1


async def test_a_queue_that_cannot_read_the_arena_gets_frames_inline(
    tmp_path: Path,
    references: list[bytes],
    arenas: Callable[[], list[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Lent, "accept", lambda offer: None)
    async with (
        served(tmp_path) as server,
        QueueClient(server.address, shared_memory_bytes=LENT_BYTES) as wire,
    ):
        actors = Actors(wire)
        await actors.start(spec())
        await produce(actors, 2)
        assert not arenas() and not references


async def test_a_queue_elsewhere_that_takes_over_ends_the_lending(
    tmp_path: Path,
    references: list[bytes],
    arenas: Callable[[], list[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with served(tmp_path) as first:
        wire = QueueClient(first.address, shared_memory_bytes=LENT_BYTES)
        actors = Actors(wire)
        await actors.start(spec())
        await produce(actors, 1)
    monkeypatch.setattr(Lent, "accept", lambda offer: None)
    async with served(tmp_path, first.port), wire:
        await produce(actors, 1, start=1)
        assert not arenas()
        assert len((await actors.take(0)).rows) == 4


async def test_what_is_wrong_with_rows_is_told_and_the_lending_goes_on(
    tmp_path: Path, references: list[bytes], arenas: Callable[[], list[str]]
) -> None:
    async with (
        served(tmp_path) as server,
        QueueClient(server.address, shared_memory_bytes=LENT_BYTES) as wire,
    ):
        actors = Actors(wire)
        await actors.start(spec())
        await actors.feed(tasks(1))
        lease = await actors.lease()
        row = lease.rows[0]
        wrong = replace(rollout_of(row, actors.version), columns={"unheard_of": np.zeros(3)})
        with pytest.raises(UserError, match="unheard_of"):
            await wire.write("run", "rollout", {row.uid: row.token}, [wrong])
        seen = len(references)
        await actors.write(lease)
        assert len(references) > seen


async def test_memory_lost_to_calls_without_an_end_is_replaced(
    tmp_path: Path, references: list[bytes], arenas: Callable[[], list[str]]
) -> None:
    async with (
        served(tmp_path) as server,
        QueueClient(server.address, shared_memory_bytes=LENT_BYTES) as wire,
    ):
        actors = Actors(wire)
        await actors.start(spec())
        seen: set[str] = set()
        for _ in range(4):
            waiting = asyncio.create_task(
                wire.lease(["run"], "reward", worker="w", limit=1, wait_s=60)
            )
            while not await wire.why_waiting("run"):  # noqa: ASYNC110  # each look is a call
                await asyncio.sleep(0)
            seen |= set(arenas())
            waiting.cancel()
            with suppress(asyncio.CancelledError):
                await waiting
        assert len(seen) > 1 and len(arenas()) == 1
        await produce(actors, 1)
