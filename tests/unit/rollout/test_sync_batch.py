"""The echo engine breaks on command; a sync batch on it never waits for a program that has left."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from meshrl.contract.errors import ConfigError, InfraError, UnavailableError
from meshrl.contract.types import OnUpdate, Version, WeightManifest
from meshrl.rollout.streams import Response, sample
from meshrl.rollout.worker import BatchGenerator, SyncBatch
from meshrl.testing.engines import echo

from .checkpoints import request


async def serving(**options: object) -> echo.EchoEngine:
    engine = echo.build({"tokens_per_s": 10_000, **options}, model=Path("none"), slots=2)
    await engine.start()
    version = Version(1, 0)
    await engine.stage_weights(
        WeightManifest(run="r", version=version, tensors=(), bucket_bytes=(), bucket_hashes=()), []
    )
    await engine.commit_weights(version, OnUpdate.DRAIN)
    return engine


async def test_a_response_repeats_its_prompt() -> None:
    engine = await serving(response_tokens=5)
    answer = await sample(engine, request("a", [7, 8, 9]))
    assert answer.tokens.tolist() == [7, 8, 9, 7, 8]
    assert answer.finish_reason == "stop"
    assert (await sample(engine, request("b", [7], max_tokens=2))).finish_reason == "length"


async def test_a_control_file_is_obeyed_while_it_exists(tmp_path: Path) -> None:
    control = tmp_path / "control"
    engine = await serving(control=control)
    control.write_text("fail")
    with pytest.raises(InfraError, match="told to fail"):
        await sample(engine, request("a", [7]))
    control.write_text("stall\n")
    stalled = asyncio.create_task(sample(engine, request("b", [7])))
    await asyncio.sleep(0.05)
    assert not stalled.done()
    control.unlink()
    assert (await stalled).tokens.tolist() == [7]
    control.write_text("crash")
    with pytest.raises(InfraError, match="told to crash"):
        await sample(engine, request("c", [7]))
    with pytest.raises(UnavailableError, match="told to crash"):
        await sample(engine, request("d", [7]))


async def test_a_request_closed_before_it_began_is_answered_with_abort() -> None:
    engine = await serving()
    stream = engine.generate(request("a", [7]))
    await engine.close()
    assert [delta.finish_reason async for delta in stream] == ["abort"]


def test_options_are_checked() -> None:
    with pytest.raises(ConfigError, match=r"rollout\.engine\.tokens_per_s"):
        echo.build({"tokens_per_s": 0}, model=Path("none"), slots=1)


@pytest.fixture
async def engine() -> echo.EchoEngine:
    return await serving()


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
