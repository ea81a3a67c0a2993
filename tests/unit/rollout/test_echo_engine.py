"""The echo engine breaks on command: what chaos tests lean on."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from meshrl.contract.errors import ConfigError, InfraError, UnavailableError
from meshrl.contract.types import OnUpdate, Version, WeightManifest
from meshrl.rollout.streams import sample
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
