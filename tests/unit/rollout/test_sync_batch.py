"""A sync batch starts its requests together, in order, and never waits for a program that has left."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from meshrl.contract.types import OnUpdate, Version, WeightManifest
from meshrl.rollout.streams import Response, sample
from meshrl.rollout.worker import BatchGenerator, SyncBatch
from meshrl.testing.engines import echo

from .checkpoints import request


@pytest.fixture
async def engine(tmp_path: Path) -> echo.EchoEngine:
    built = echo.build({"tokens_per_s": 10_000}, model=tmp_path, slots=2)
    await built.start()
    version = Version(1, 0)
    await built.stage_weights(
        WeightManifest(run="r", version=version, tensors=(), bucket_bytes=(), bucket_hashes=()), []
    )
    await built.commit_weights(version, OnUpdate.DRAIN)
    return built


async def turns(generator: BatchGenerator, count: int, delay_s: float) -> list[Response]:
    """A program of `count` turns that thinks `delay_s` before each."""
    responses = []
    for turn in range(count):
        await asyncio.sleep(delay_s)
        responses.append(await sample(generator, request(str(turn), [3, 4 + turn])))
    return responses


async def test_no_request_starts_before_every_program_has_one(engine: echo.EchoEngine) -> None:
    batch = SyncBatch(engine, 3)
    early = [asyncio.create_task(turns(batch.generator(i), 1, 0.0)) for i in range(2)]
    await asyncio.sleep(0.05)
    assert engine.stats().tokens_generated == 0
    late = await turns(batch.generator(2), 1, 0.0)
    assert [(await task)[0].tokens.tolist() for task in early] == [[3, 4], [3, 4]]
    assert late[0].finish_reason == "stop"


async def test_programs_of_different_length_all_end_when_each_leaves(
    engine: echo.EchoEngine,
) -> None:
    batch = SyncBatch(engine, 4)

    async def member(index: int) -> int:
        try:
            return len(await turns(batch.generator(index), index, 0.003 * (4 - index)))
        finally:
            batch.leave(index)

    async with asyncio.timeout(120):
        assert await asyncio.gather(*(member(i) for i in range(4))) == [0, 1, 2, 3]


async def test_a_cancelled_program_blocks_no_other(engine: echo.EchoEngine) -> None:
    batch = SyncBatch(engine, 3)

    async def member(index: int, delay_s: float) -> list[Response]:
        try:
            return await turns(batch.generator(index), 1, delay_s)
        finally:
            batch.leave(index)

    first = asyncio.create_task(member(0, 0.0))
    thinking = asyncio.create_task(member(1, 1000.0))
    other = asyncio.create_task(member(2, 0.0))
    await asyncio.sleep(0.02)
    first.cancel()
    thinking.cancel()
    async with asyncio.timeout(120):
        assert (await other)[0].tokens.tolist() == [3, 4]
    await asyncio.gather(first, thinking, return_exceptions=True)
