"""The trainer and the feeder open runs; stages find them, sooner or later, and work on none with other settings."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from meshrl.config.loading import load_recipe
from meshrl.config.recipe import Recipe
from meshrl.config.stages import train_spec
from meshrl.contract.errors import UserError
from meshrl.launcher import stage_service
from meshrl.launcher.stage_service import find_runs, open_runs, until_run_differs
from meshrl.transferqueue.queue import TransferQueue

RECIPE = """
run: {name: mine, dir: RUNS}
model: {path: none}
data: {train_files: [none.jsonl]}
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    (tmp_path / "my.yaml").write_text(RECIPE.replace("RUNS", str(tmp_path / "run")))
    return load_recipe(tmp_path / "my.yaml", check=False)


@pytest.fixture(autouse=True)
def _looking_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage_service, "LOOK_S", 0.01)


async def test_a_stage_that_comes_first_opens_nothing_and_ends_when_the_run_differs(
    recipe: Recipe, queue: TransferQueue
) -> None:
    assert await find_runs(queue, recipe) == ("mine",)
    looking = asyncio.ensure_future(until_run_differs(queue, recipe))
    await asyncio.sleep(0.05)
    assert queue.runs == () and not looking.done()
    await queue.open_run(replace(train_spec(recipe), batch_groups=3))
    async with asyncio.timeout(20):
        with pytest.raises(UserError, match=r"batch_groups.*keep its settings"):
            await looking
    with pytest.raises(UserError, match="batch_groups"):
        await find_runs(queue, recipe)
    with pytest.raises(UserError, match="batch_groups"):
        await open_runs(queue, recipe)


async def test_a_stage_looks_no_more_once_the_run_is_its_recipes(
    recipe: Recipe, queue: TransferQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[str] = []
    run_state = queue.run_state

    async def seen(run: str) -> object:
        looks.append(run)
        return await run_state(run)

    monkeypatch.setattr(queue, "run_state", seen)
    looking = asyncio.ensure_future(until_run_differs(queue, recipe))
    await asyncio.sleep(0.05)
    assert len(looks) > 1
    await open_runs(queue, recipe)
    await asyncio.sleep(0.05)
    after = len(looks)
    await asyncio.sleep(0.05)
    assert len(looks) == after and not looking.done()
    looking.cancel()
    await asyncio.gather(looking, return_exceptions=True)
