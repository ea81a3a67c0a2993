"""The doubles: an engine with a recipe's pace, a queue in memory, tiny models of each architecture."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
import uvloop

from meshrl.client import Queue
from meshrl.contract.errors import ConfigError
from meshrl.contract.types import (
    ROLLOUT_STAGE,
    GenerateRequest,
    OnUpdate,
    RunSpec,
    SamplingParams,
    Version,
    WeightManifest,
)
from meshrl.rollout.streams import sample
from meshrl.testing.queue import memory_queue, queue_service
from meshrl.trainer.ranks.world import World
from tests.doubles import paced_engine
from tests.doubles.architectures import KINDS, Tried, attempt
from tests.doubles.trainable import tried
from tests.simulation.loop import SimulatedLoop

FIRST = Version(1, 0)
ALIKE = {"tokens_per_s": 400.0, "length_mean": 100.0, "length_p99": 100.0}


def seconds(requests: int, **options: float) -> float:
    """Wait until an engine of eight slots has answered so many requests that came together."""
    loop = SimulatedLoop(0)

    async def run() -> float:
        began = loop.time()
        await answered(requests, **options)
        return loop.time() - began

    try:
        return loop.run_until_complete(run())
    finally:
        loop.close()


def test_a_request_has_its_part_of_the_speed_of_all_slots() -> None:
    assert seconds(1) == pytest.approx(2.0)
    assert seconds(8) == pytest.approx(2.0)
    assert seconds(16) == pytest.approx(4.0)


def test_a_request_that_runs_alone_may_be_faster() -> None:
    assert seconds(1, alone_speedup=4.0) == pytest.approx(0.5)
    assert seconds(8, alone_speedup=4.0) == pytest.approx(2.0)


def test_lengths_differ_and_are_cut_at_what_the_request_allows() -> None:
    assert seconds(8, length_mean=1000.0, length_p99=1000.0) == pytest.approx(2.0)
    assert 1.0 < seconds(8, length_mean=50.0, length_p99=60.0) < 1.5


def test_a_percentile_that_no_mean_allows_is_refused() -> None:
    with pytest.raises(ConfigError, match="want 1 to 15 times the mean"):
        paced_engine.build({"length_mean": 10.0, "length_p99": 500.0}, model=Path(), slots=1)


def test_every_answer_ends_on_a_loop_whose_timers_are_due_at_once() -> None:
    # At 5,000 tokens/s a chunk ends within the millisecond that is uvloop's finest timer.
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        answers = runner.run(answered(32, length_mean=50.0, length_p99=90.0, tokens_per_s=40_000.0))
    assert answers == 32


async def answered(requests: int, **options: float) -> int:
    """How many of so many requests that come together an engine of eight slots answers."""
    engine = paced_engine.build({**ALIKE, **options}, model=Path(), slots=8)
    await engine.start()
    manifest = WeightManifest(run="r", version=FIRST, tensors=(), bucket_bytes=(), bucket_hashes=())
    await engine.stage_weights(manifest, [])
    await engine.commit_weights(FIRST, OnUpdate.DRAIN)
    asked = [
        GenerateRequest(
            request_id=str(number),
            prompt_ids=np.array([5, 6, 7], np.int32),
            sampling=SamplingParams(max_tokens=100),
        )
        for number in range(requests)
    ]
    async with asyncio.timeout(60):
        answers = await asyncio.gather(*(sample(engine, request) for request in asked))
    assert all(len(answer.tokens) <= 100 for answer in answers)
    await engine.close()
    return len(answers)


SPEC = RunSpec(run="mine", group_size=1, batch_groups=1, max_staleness=0.0, stages=(ROLLOUT_STAGE,))


async def test_a_queue_in_memory_keeps_a_ledger_of_its_run() -> None:
    async with memory_queue([SPEC]) as queue:
        assert (await queue.ledger("mine")).balanced


async def test_the_same_queue_answers_the_client_over_grpc() -> None:
    async with queue_service([SPEC]) as address, Queue.connect(address) as queue:
        run = await queue.open_run(SPEC)
        assert (await run.ledger()).admitted == 0


TRAINABLE = (
    "bart",
    "bloom",
    "falcon",
    "gpt2",
    "granitemoehybrid",
    "jamba",
    "lfm2",
    "nemotron",
    "phi",
    "phimoe",
    "nemotron_h",
    "qwen3_5_text",
    "qwen3_next",
    "stablelm",
)
"""One type for each outcome; `python -m tests.doubles.trainable` tries all types, which takes minutes."""


@pytest.mark.parametrize("kind", TRAINABLE)
def test_the_check_of_a_recipe_says_of_a_model_what_the_trainer_finds(kind: str) -> None:
    found, said = tried(kind)
    assert bool(found) == bool(said), (found, said)


PAGE = Path(__file__).parents[3] / "docs" / "reference" / "models.md"


def listed() -> dict[str, Tried]:
    """The lines of the page's first table."""
    first = PAGE.read_text().partition("\n## ")[0]
    rows = [line.strip("| ").split("|") for line in first.splitlines() if "|" in line]
    cells = [[cell.strip() for cell in row] for row in rows[2:]]
    return {name: Tried(name, *rest, *[""] * (6 - len(rest))) for name, *rest in cells}


def test_the_page_of_models_has_every_architecture_that_the_command_tries() -> None:
    assert list(listed()) == list(KINDS)


OFTEN = ("DeepseekV3", "GptOss", "Mixtral", "Llama4Text")
SWEEP = [pytest.param(each, marks=pytest.mark.nightly) for each in KINDS if each not in OFTEN]


@pytest.mark.filterwarnings("ignore:DTensor random operators:UserWarning")  # OlmoHybrid's
@pytest.mark.parametrize("name", [*OFTEN, *SWEEP])
def test_an_architecture_comes_out_as_the_page_says(
    name: str, tmp_path: Path, world: World
) -> None:
    found, said = attempt(name, tmp_path, world), listed()[name]
    for figure in ("logprobs", "gradients", "served"):
        mine, theirs = getattr(found, figure), getattr(said, figure)
        if theirs in ("", "no"):
            assert mine == theirs
        else:
            assert float(mine) < 1e-4 and float(theirs) < 1e-4
    assert (found.published, found.note) == (said.published, said.note)
