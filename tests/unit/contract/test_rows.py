"""A stage's write of a trajectory."""

from __future__ import annotations

import numpy as np

from meshrl.contract.rows import reward_write, rollout_write, text_column, trajectory
from meshrl.contract.types import Columns, Outcome, Score, Trajectory, Uid, Version, VersionSpan


def test_the_oldest_version_of_a_row_is_that_of_the_earliest_step() -> None:
    before, after = Version(1, 3), Version(2, 0)  # the trainer went back to its start in between
    sampled = Trajectory(
        uid=Uid("run", "task", 0, 0),
        tokens=np.arange(6, dtype=np.int32),
        loss_mask=np.ones(6, np.uint8),
        rollout_logprobs=np.zeros(6, np.float32),
        spans=(
            VersionSpan(version=before, start=0, end=4),
            VersionSpan(version=after, start=4, end=6),
        ),
    )
    facts = rollout_write(sampled, Outcome.OK, "stop", after).facts
    assert facts is not None
    assert (facts.oldest, facts.newest) == (after, after)


def test_a_row_says_how_much_of_its_beginning_is_the_prompt_of_its_task() -> None:
    sampled = Trajectory(
        uid=Uid("run", "task", 0, 0),
        tokens=np.arange(6, dtype=np.int32),
        loss_mask=np.ones(6, np.uint8),
        rollout_logprobs=np.zeros(6, np.float32),
        spans=(),
    )

    def known(*prompt: int) -> int:
        asked = np.array(prompt, np.int32)
        facts = rollout_write(sampled, Outcome.OK, "stop", Version(1, 0), asked).facts
        assert facts is not None
        return facts.prompt_tokens

    assert known(0, 1, 2) == 3
    assert known(0, 1, 5) == 0  # a program wrote another beginning
    assert known(*range(7)) == 0
    assert known() == 0


def test_what_a_judge_says_is_kept_beside_its_numbers() -> None:
    tokens = np.arange(3, dtype=np.int32)
    sampled: Columns = {
        "tokens": tokens,
        "loss_mask": np.ones(3, np.uint8),
        "rollout_logprobs": np.zeros(3, np.float32),
        "spans": np.zeros((0, 4), np.int64),
    }
    uid = Uid("run", "task", 0, 0)
    score = Score(
        uid=uid, outcome=Outcome.OK, score=1.0, components={"acc": 1.0}, texts={"why": "it is 42"}
    )
    row = trajectory(uid, {**sampled, **reward_write(score).columns})
    assert (row.reward_components, row.reward_texts) == ({"acc": 1.0}, {"why": "it is 42"})
    before = {**sampled, "reward_components": text_column('{"acc": 0.5}')}
    assert trajectory(uid, before).reward_components == {"acc": 0.5}
    assert trajectory(uid, before).reward_texts == {}
