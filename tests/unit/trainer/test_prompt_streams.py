"""Streams of prompts: shares of several data sets, and levels of tasks that follow held-out scores."""

from __future__ import annotations

import asyncio
from collections import Counter
from itertools import chain
from pathlib import Path

import numpy as np
import pytest

from meshrl.contract.errors import UserError
from meshrl.contract.types import RunSpec, SamplingParams, Task, Version
from meshrl.trainer.data.feeder import Feeder, PromptOrder
from meshrl.trainer.data.prompt_streams import LevelHistory, LevelStream, MixedStream, level_scores
from meshrl.trainer.data.prompts import Prompt, PromptSet, task_maker
from meshrl.trainer.data.reasoning_gym import ReasoningGymConfig, ReasoningGymCurriculumConfig
from meshrl.trainer.learner.metrics import MOST_SOURCES, source_means
from meshrl.trainer.loop.evaluation import Evaluator
from meshrl.transferqueue import stores
from meshrl.transferqueue.config import QueueConfig
from meshrl.transferqueue.model.records import Exit
from meshrl.transferqueue.queue import TransferQueue

from ...waiting import until


def prompts(**sizes: int) -> list[Prompt]:
    """Prompts, so many of each source, in files named like it."""
    named = [(name, row) for name, size in sizes.items() for row in range(size)]
    return [
        Prompt(
            index=index, where=f"{name}.jsonl:{row}", data_source=name,
            prompt_ids=np.array([index], np.int32),
        )
        for index, (name, row) in enumerate(named)
    ]  # fmt: skip


def mixture(made: list[Prompt], weights: dict[str, float], *, seed: int = 0) -> MixedStream:
    return MixedStream(made, weights, shuffle=True, seed=seed)


def test_any_stretch_of_the_stream_has_the_shares_whatever_the_sizes_are() -> None:
    made = prompts(small=5, large=95)
    mixed = mixture(made, {"small": 1, "large": 3})
    stream = list(chain.from_iterable(mixed.epoch(epoch) for epoch in range(4)))
    assert len(stream) == 400
    for start in range(0, 400, 20):
        counts = Counter(made[place].data_source for _, place in stream[start : start + 20])
        assert abs(counts["small"] - 5) <= 1


def test_no_prompt_of_a_source_comes_again_before_all_the_others() -> None:
    made = prompts(a=7, b=13)
    mixed = mixture(made, {"a": 2, "b": 1})
    stream = list(chain.from_iterable(mixed.epoch(epoch) for epoch in range(9)))
    assert len(set(stream)) == len(stream)
    of_a = [place for _, place in stream if place < 7]
    passes = [of_a[start : start + 7] for start in range(0, len(of_a) - 6, 7)]
    assert all(sorted(one) == list(range(7)) for one in passes)
    assert len({tuple(one) for one in passes}) > 1
    again = mixture(made, {"b": 1, "a": 2})
    assert list(chain.from_iterable(again.epoch(epoch) for epoch in range(9))) == stream
    assert mixture(made, {"a": 2, "b": 1}, seed=1).epoch(0) != mixed.epoch(0)


def test_weights_name_files_or_sources() -> None:
    made = prompts(a=6, b=6)
    mixed = mixture(made, {"./a.jsonl": 1, "b": 2})
    counts = Counter(made[place].data_source for _, place in mixed.epoch(0))
    assert counts == {"a": 4, "b": 8}
    whole = mixture(made, {"a.jsonl": 1, "b.jsonl": 1})
    assert sorted(whole.epoch(0)) == [(0, place) for place in range(12)]


@pytest.mark.parametrize(
    ("weights", "said"),
    [
        ({"a": 1.0}, "b.jsonl:0: data.weights has neither this file nor data_source 'b' .it has a"),
        ({"a": 1.0, "b": 1.0, "c": 1.0}, "no prompt is of 'c'; want files as in data.train_files"),
        ({"a": 1.0, "b": 0.001}, "'b' weighs so little that an epoch of 20 prompts has none"),
    ],
)
def test_weights_that_do_not_fit_the_rows_are_refused(weights: dict[str, float], said: str) -> None:
    with pytest.raises(UserError, match=said):
        mixture(prompts(a=10, b=10), weights)


def test_figures_are_means_of_each_source() -> None:
    found = source_means(["a", "b", "a", ""], {"reward": [1, 0.5, 0, 9]})
    assert found == {"a/rows": 2, "a/reward": 0.5, "b/rows": 1, "b/reward": 0.5}
    assert source_means(["", ""], {"reward": [1, 2]}) == {}


def test_sources_beyond_the_bound_and_unprintable_ones_share_a_name() -> None:
    names = [f"{number:03d}" for number in range(MOST_SOURCES + 2)] + ["a\nb"]
    found = source_means(names, {})
    assert len(found) == MOST_SOURCES + 1 and found["others/rows"] == 3


RULE = ReasoningGymCurriculumConfig(raise_at=0.8)
GYM = ReasoningGymConfig.model_validate(
    {"tasks": {"gcd": {"weight": 3}, "lcm": {}}, "levels": 3, "curriculum": {}}
)
PROMPTS = tuple(
    Prompt(
        index=index,
        prompt_ids=np.array([index], np.int32),
        data_source="gcd" if index < 18 else "lcm",
        extra_info={"difficulty": index % 3},
    )
    for index in range(24)
)
BATCH = 4


def stream(prompts: tuple[Prompt, ...] = PROMPTS) -> LevelStream:
    return LevelStream(prompts, GYM, evaluation="r.eval", batch=BATCH, seed=7)


def raised(*steps: int) -> LevelHistory:
    """A history in which both tasks went up a level at each of `steps`."""
    history = LevelHistory()
    for level, step in enumerate(steps):
        scores = {("gcd", level): 0.9, ("lcm", level): 0.9}
        history = history.after(step, scores, RULE, GYM.levels)
    return history


def test_a_level_rises_at_a_high_score_and_else_stays() -> None:
    history = LevelHistory().after(0, {("gcd", 0): 0.8, ("gcd", 1): 0.0, ("lcm", 0): 0.79}, RULE, 3)
    assert history.levels == {"gcd": 1, "lcm": 0}
    history = history.after(10, {("gcd", 0): 0.0, ("gcd", 1): 1.0, ("lcm", 0): 0.1}, RULE, 3)
    assert history.levels == {"gcd": 2, "lcm": 0}  # none is below the first
    history = history.after(20, {("gcd", 2): 1.0, ("lcm", 1): 1.0}, RULE, 3)
    assert history.levels == {"gcd": 2, "lcm": 0}  # none is above the last; no score at its level
    assert history.after(30, {("lcm", 0): 0.1}, RULE, 3).levels == history.levels  # gcd's are lost
    assert LevelHistory.parse(history.text()) == history
    assert LevelHistory.parse("1.40-7") == LevelHistory() == LevelHistory.parse("")


def test_a_step_that_was_evaluated_before_decides_nothing_again() -> None:
    history = raised(10)
    assert history.after(10, {("gcd", 1): 1.0}, RULE, 3) is history
    assert history.after(5, {("gcd", 1): 1.0}, RULE, 3) is history


def test_levels_hold_from_their_evaluation_on() -> None:
    history = raised(10, 20)
    assert history.at(9) == {}
    assert history.at(10) == history.at(19) == {"gcd": 1, "lcm": 1}
    assert history.at(20) == {"gcd": 2, "lcm": 2} == history.levels


def test_prompts_of_the_present_level_come_by_weight_and_once_a_pass() -> None:
    drawing = stream()
    assert drawing.adopt(raised(0), 3 * BATCH)
    assert not drawing.adopt(raised(0, 1), 3 * BATCH)  # decided for this position
    drawn = [drawing.draw(position) for position in range(16)]
    places = [place for _, place in drawn]
    assert {place % 3 for place in places} == {1}
    assert Counter(place < 18 for place in places) == {True: 12, False: 4}
    assert len(set(drawn)) == 16 and max(turn for turn, _ in drawn) == 1


def test_a_level_without_a_prompt_is_refused_by_name() -> None:
    with pytest.raises(UserError, match="no prompt of lcm is left at level 2"):
        stream(tuple(p for p in PROMPTS if p.index % 3 < 2 or p.index < 18))


def test_scores_are_means_of_the_rows_that_have_a_level() -> None:
    rows = [
        ("gcd", {"difficulty": 1}, 1.0),
        ("gcd", {"difficulty": 1}, 0.0),
        ("gsm8k", {}, 1.0),
    ]
    assert level_scores(rows) == {("gcd", 1): 0.5}


async def open_queue(path: Path, store: str = "memory") -> TransferQueue:
    config = QueueConfig.model_validate({"store": store})
    queue = await TransferQueue.open(stores.build(config, path))
    common = {"group_size": 1, "lease_ttl_s": 30.0}
    await queue.open_run(RunSpec(run="r", batch_groups=BATCH, max_staleness=0.0, **common))  # type: ignore[arg-type]
    await queue.open_run(
        RunSpec(run="r.eval", batch_groups=1, max_staleness=np.inf, gated=False, **common)  # type: ignore[arg-type]
    )
    return queue


def feeder(queue: TransferQueue) -> Feeder:
    make = task_maker(
        "r", group_size=1, sampling=SamplingParams(), program="single_turn", deadline_s=60
    )
    prompts = PromptSet(prompts=PROMPTS, skipped=0, fingerprint="p")
    order = PromptOrder(shuffle=True, seed=7, levels=stream())
    return Feeder(queue, "r", prompts, make, epochs=None, order=order)


async def full(queue: TransferQueue) -> None:
    """Wait for a whole batch."""
    await until(lambda: len(queue._run("r").by_task) >= BATCH)


async def fed(queue: TransferQueue, steps: int, seen: list[str]) -> None:
    """Make room as `steps` steps of training do, and note the tasks that come in."""
    for _ in range(steps):
        await full(queue)
        state = queue._run("r")
        seen += state.by_task
        for group in list(state.by_task.values()):
            state.remove_group(group, Exit.FILTERED, "trained")
        state.notify_all()


@pytest.mark.parametrize("killed_after", [None, 1, 4])
async def test_a_killed_feeder_goes_on_at_the_levels_of_its_chunk(
    tmp_path: Path, killed_after: int | None
) -> None:
    """The same tasks in the same order as an uninterrupted one, though scores changed while it was dead."""
    queue = await open_queue(tmp_path)
    await queue.admit("r.eval", [], cursor=raised(1).text(), wait_s=0)
    seen: list[str] = []
    feeding = asyncio.create_task(feeder(queue).run())
    if killed_after is not None:
        await fed(queue, killed_after, seen)
        await full(queue)  # the next chunk has begun
        feeding.cancel()
        await asyncio.gather(feeding, return_exceptions=True)
        feeding = asyncio.create_task(feeder(queue).run())
    await fed(queue, 8 - (killed_after or 0), seen)
    feeding.cancel()
    await asyncio.gather(feeding, return_exceptions=True)
    levels = [int(task.split("-")[1]) % 3 for task in seen]
    assert levels == [0] * 3 * BATCH + [1] * 5 * BATCH  # step 1 was evaluated: from batch 3 on
    assert len(set(seen)) == len(seen)
    again = stream()
    places = []
    for position in range(len(seen)):
        if position % BATCH == 0:
            again.adopt(raised(1), position)
        places.append("{}-{}".format(*again.draw(position)))
    assert seen == places
    await queue.close()


async def test_a_chunk_that_was_begun_keeps_its_levels_when_scores_change_before_the_restart(
    tmp_path: Path,
) -> None:
    queue = await open_queue(tmp_path, "disk")
    first = feeder(queue)
    first.position = 4 * BATCH
    assert first._order.levels
    await first._follow_scores(first._order.levels)  # stores that this chunk has level 0
    await queue.admit("r.eval", [], cursor=raised(1).text(), wait_s=0)
    await queue.close()
    queue = await open_queue(tmp_path, "disk")  # what the queue has on disk, and no more
    second = feeder(queue)
    second.position = second._start(await queue.run_state("r"))
    assert second._order.levels and second.position == 4 * BATCH
    await second._follow_scores(second._order.levels)
    assert second._order.levels.state()["levels"] == {}
    second.position += BATCH
    await second._follow_scores(second._order.levels)
    assert second._order.levels.state()["levels"] == {"gcd": 1, "lcm": 1}
    await queue.close()


async def test_a_run_without_levels_does_not_go_on_with_them_nor_the_other_way(
    tmp_path: Path,
) -> None:
    queue = await open_queue(tmp_path)
    with_levels = feeder(queue)
    assert with_levels._order.levels
    await with_levels._follow_scores(with_levels._order.levels)
    without = feeder(queue)
    without._order = PromptOrder(shuffle=True, seed=7)
    with pytest.raises(UserError, match="was fed curriculum held-out score, now it is None"):
        without._start(await queue.run_state("r"))
    await queue.admit("r", [], cursor=without._cursor(4), wait_s=0)
    with pytest.raises(UserError, match="was fed curriculum None, now it is held-out score"):
        with_levels._start(await queue.run_state("r"))
    await queue.close()


async def test_the_evaluator_stores_what_it_decides_and_the_next_trainer_reads_it(
    tmp_path: Path,
) -> None:
    queue = await open_queue(tmp_path)
    spec = (await queue.run_state("r.eval")).spec
    tasks = [
        Task(
            run="r.eval",
            task_id=str(level),
            prompt_ids=np.array([1], np.int32),
            data_source="gcd",
            extra_info={"difficulty": level},
        )
        for level in range(3)
    ]
    scored = [(task, score) for task, score in zip(tasks, (0.9, 0.5, 0.0), strict=True)]

    def trainer() -> Evaluator:
        return Evaluator(queue, spec, tasks, owner="t", curriculum=GYM)

    first = trainer()
    await first.open()
    decided = await first._decide(GYM, Version(1, 20), scored)
    assert decided == {"gcd/level": 1, "gcd/score": 0.9, "lcm/level": 0}
    second = trainer()  # the first was killed; its checkpoint is of step 10
    await second.open()
    assert (await second._decide(GYM, Version(2, 20), scored))["gcd/level"] == 1
    assert (await second._decide(GYM, Version(2, 30), scored))["gcd/score"] == 0.5
    await second._admit([tasks[0]], 0.0)  # the next evaluation's tasks leave the history in place
    history = LevelHistory.parse((await queue.run_state("r.eval")).cursor)
    assert history.step == 30 and history.at(20) == {"gcd": 1}
    await queue.close()
