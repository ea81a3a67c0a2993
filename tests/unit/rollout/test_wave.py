"""A wave starts together, in seat order, and never waits for somebody who has left."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from meshrl.contract.types import OnUpdate, Version, WeightManifest
from meshrl.rollout.sampling import Response, sample
from meshrl.rollout.sync_batch import Seat, SyncBatch
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


async def turns(seat: Seat, count: int, delay_s: float) -> list[Response]:
    """A program of `count` turns that thinks `delay_s` before each."""
    answers = []
    for turn in range(count):
        await asyncio.sleep(delay_s)
        answers.append(await sample(seat, request(str(turn), [3, 4 + turn])))
    return answers


async def test_nobody_starts_before_everybody_has_asked(engine: echo.EchoEngine) -> None:
    wave = SyncBatch(engine, 3)
    early = [asyncio.create_task(turns(wave.seat(i), 1, 0.0)) for i in range(2)]
    await asyncio.sleep(0.05)
    assert engine.stats().tokens_generated == 0
    late = await turns(wave.seat(2), 1, 0.0)
    assert [(await task)[0].tokens.tolist() for task in early] == [[3, 4], [3, 4]]
    assert late[0].finish_reason == "stop"


async def test_programs_of_different_length_all_end_when_each_leaves(
    engine: echo.EchoEngine,
) -> None:
    wave = SyncBatch(engine, 4)

    async def member(index: int) -> int:
        try:
            return len(await turns(wave.seat(index), index, 0.003 * (4 - index)))
        finally:
            wave.leave(index)

    async with asyncio.timeout(120):
        assert await asyncio.gather(*(member(i) for i in range(4))) == [0, 1, 2, 3]


async def test_a_cancelled_member_holds_nobody_up(engine: echo.EchoEngine) -> None:
    wave = SyncBatch(engine, 3)

    async def member(index: int, delay_s: float) -> list[Response]:
        try:
            return await turns(wave.seat(index), 1, delay_s)
        finally:
            wave.leave(index)

    asked = asyncio.create_task(member(0, 0.0))
    thinking = asyncio.create_task(member(1, 1000.0))
    other = asyncio.create_task(member(2, 0.0))
    await asyncio.sleep(0.02)
    asked.cancel()
    thinking.cancel()
    async with asyncio.timeout(120):
        assert (await other)[0].tokens.tolist() == [3, 4]
    await asyncio.gather(asked, thinking, return_exceptions=True)
