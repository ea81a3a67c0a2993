"""A row of several turns that another worker continues equals the uninterrupted row."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from meshrl.contract.types import Columns, LeasedRow, SamplingParams, Task, Trajectory, Uid, Version
from meshrl.rollout.config import CheckpointIntervals
from meshrl.rollout.conversation import Budget, Conversation
from meshrl.rollout.generation_checkpoint import (
    GenerationCheckpointer,
    ResumableGenerator,
    observation,
)
from meshrl.rollout.ports import UNSERVED, Generator

from .checkpoints import FIRST, Checkpoint, forced_logprobs
from .conftest import EngineMaker

UID = Uid("run", "t0", 0)
PROMPT = np.arange(3, 9, dtype=np.int32)
OBSERVATIONS = [[11, 12, 13], [14], [15, 16]]
"""Observed tokens after each turn."""


class Words:
    def decode(self, ids: Any) -> str:
        return " ".join(map(str, ids))


def task(**sampling: Any) -> Task:
    how = SamplingParams(**{"max_tokens": 60, "seed": 5} | sampling)
    return Task(run="run", task_id="t0", prompt_ids=PROMPT, sampling=how)


async def talk(engine: Generator, row_task: Task) -> Trajectory:
    budget = Budget.of(row_task, turn_tokens=12, turns=4)
    conversation = Conversation(UID, Words(), PROMPT, budget=budget)
    for observed in OBSERVATIONS:
        await conversation.sample(engine, row_task.sampling)
        assert conversation.observe_tokens(observed)
    await conversation.sample(engine, row_task.sampling)
    return conversation.rollout().trajectory


def checkpointer() -> GenerationCheckpointer:
    never: Any = None  # a queue that is never called: nothing is appended here
    intervals = CheckpointIntervals(tokens=0, ms=0)
    return GenerationCheckpointer(never, intervals, max_staleness=9, lost=lambda uids: None)


def checkpoint_of(row: Trajectory, length: int) -> Columns:
    """The prefix in the queue when the first `length` tokens after the prompt of `row` were saved."""
    start, end = len(PROMPT), len(PROMPT) + length
    versions = np.array([[UNSERVED.epoch, UNSERVED.step]] * len(row.tokens), dtype=np.int32)
    for span in row.spans:
        versions[span.start : span.end] = (span.version.epoch, span.version.step)
    return {
        "tokens": row.tokens[start:end],
        "rollout_logprobs": row.rollout_logprobs[start:end],
        "versions": versions[start:end],
    }


def leased(row_task: Task, prefix: Columns) -> LeasedRow:
    return LeasedRow(uid=UID, token=1, task=row_task, columns={}, delivery=2, prefix=prefix)


@pytest.mark.parametrize("how", [{"temperature": 0.0}, {"temperature": 0.8, "top_k": 20}])
async def test_a_row_is_the_same_wherever_its_checkpoint_ends(
    qwen3: Checkpoint, make_engine: EngineMaker, how: dict[str, Any]
) -> None:
    engine = await make_engine(qwen3.path, eos_token_ids=[])
    row_task = task(**how)
    whole = await talk(engine, row_task)
    turns = [12, 15, 27, 28, 40, 42]
    assert (
        whole.loss_mask[len(PROMPT) :].tolist()
        == np.repeat([1, 0, 1, 0, 1, 0, 1], np.diff([0, *turns, 54])).tolist()
    )
    sampled = whole.loss_mask.astype(bool)
    for end in [*turns[::2], 54]:
        prompt, turn = np.split(whole.tokens[: len(PROMPT) + end], [len(PROMPT) + end - 12])
        want = forced_logprobs(
            qwen3.model, prompt, turn, **how | {"temperature": how["temperature"] or 1.0}
        )
        found = whole.rollout_logprobs[len(prompt) : len(prompt) + 12]
        np.testing.assert_allclose(found, want, atol=1e-4)
    # Checkpoints end at the ends of deltas, of which an observation is one.
    for cut in (5, *turns, 20, 33, 53, 54):
        checkpoints = checkpointer()
        row = await talk(
            ResumableGenerator(engine, checkpoints, leased(row_task, checkpoint_of(whole, cut))),
            row_task,
        )
        assert row.tokens.tolist() == whole.tokens.tolist(), cut
        assert row.loss_mask.tolist() == whole.loss_mask.tolist()
        assert row.spans == whole.spans
        np.testing.assert_allclose(row.rollout_logprobs, whole.rollout_logprobs, atol=1e-4)
        assert checkpoints.keeps(UID) and checkpoints.stats.continued == cut
        assert (row.rollout_logprobs[~sampled] == 0).all()


async def test_the_checkpoint_of_another_course_of_the_conversation_is_not_continued(
    qwen3: Checkpoint, make_engine: EngineMaker
) -> None:
    engine = await make_engine(qwen3.path, eos_token_ids=[])
    row_task = task()
    whole = await talk(engine, row_task)
    prefix = dict(checkpoint_of(whole, 54))
    prefix["tokens"] = prefix["tokens"].copy()
    prefix["tokens"][13] += 1  # another observation after the first turn
    prefix["versions"] = prefix["versions"].copy()
    prefix["versions"][:12] = (1, 1)
    checkpoints = checkpointer()
    row = await talk(ResumableGenerator(engine, checkpoints, leased(row_task, prefix)), row_task)
    assert row.tokens.tolist() == whole.tokens.tolist()
    first, second = row.spans[:2]
    assert (first.version, second.version) == (Version(1, 1), FIRST)
    assert not checkpoints.keeps(UID)


def test_a_row_that_is_leased_again_is_saved_by_its_new_lease_alone() -> None:
    checkpoints = checkpointer()
    row = task()
    older, newer = leased(row, {}), replace(leased(row, {}), token=2)
    delta = observation(np.array([11], dtype=np.int32))
    assert checkpoints.begin(older, FIRST) == [] and checkpoints.begin(newer, FIRST) == []
    checkpoints.record(older, delta)
    checkpoints.end(older)
    assert checkpoints.begin(older, FIRST) is None
    assert checkpoints.keeps(UID) and not checkpoints.unsaved()
    checkpoints.record(newer, delta)
    assert checkpoints.unsaved() == 1
    checkpoints.end(newer)
    assert not checkpoints.keeps(UID)


async def test_two_requests_at_once_end_the_recording(
    qwen3: Checkpoint, make_engine: EngineMaker
) -> None:
    engine = await make_engine(qwen3.path, eos_token_ids=[])
    row_task = task()
    checkpoints = checkpointer()
    generator = ResumableGenerator(engine, checkpoints, leased(row_task, {}))
    conversation = Conversation(UID, Words(), PROMPT, budget=Budget.of(row_task))
    request = conversation.request(row_task.sampling)
    first = generator.generate(request)
    await anext(first)
    assert checkpoints.keeps(UID)
    second = generator.generate(request)
    await anext(second)
    assert not checkpoints.keeps(UID)
    await first.aclose()  # type: ignore[attr-defined]
    await second.aclose()  # type: ignore[attr-defined]
