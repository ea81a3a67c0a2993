"""Rows: a stage's write of a trajectory, and what the values of columns may be."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from meshrl.contract.routed_experts import RoutedExperts
from meshrl.contract.row_values import row_fault, value_fault
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


NAN = float("nan")


def said(name: str, *rows: Any, tokens: int = 4, dtype: str = "", vocabulary: int = 9) -> str:
    """The fault of a column, with the number of the row in front; empty for a good column."""
    arrays = [text_column(row) if isinstance(row, str) else np.array(row, dtype) for row in rows]
    fault = value_fault(
        name,
        np.concatenate(arrays),
        [len(array) for array in arrays],
        tokens=[tokens] * len(rows),
        vocabulary=vocabulary,
    )
    return f"{fault.row}: {fault.problem}" if fault else ""


def span(*of: tuple[int, int]) -> list[tuple[int, int, int, int]]:
    return [(1, 0, start, end) for start, end in of]


@pytest.mark.parametrize(
    ("name", "dtype", "rows"),
    [
        ("tokens", "<i4", [[0, 8], [], [1]]),
        ("loss_mask", "u1", [[0, 1, 1], [], [0]]),
        ("rollout_logprobs", "<f4", [[0, -3.4e38], []]),
        ("ref_top_ids", "<i4", [[[0, 8]], [[3, 4]]]),
        ("ref_top_logprobs", "<f4", [[[0, -1]]]),
        ("spans", "<i8", [span((0, 4)), span((1, 2), (2, 4))]),
        ("spans", "<i8", [span((1, 1)), np.zeros((0, 4)), span((0, 2))]),
        ("of_a_stage_of_ones_own", "<f4", [[NAN]]),
        ("reward", "<f4", [[1.0], [2.0]]),
        ("rollout_times", "<f8", [[1.0, 2.0]]),
    ],
)
def test_what_rows_may_have_is_passed(name: str, dtype: str, rows: list[Any]) -> None:
    assert said(name, *rows, dtype=dtype) == ""


@pytest.mark.parametrize(
    ("name", "dtype", "rows", "problem"),
    [
        ("tokens", "<i4", [[1, 2], [3, 9]], "1: column tokens holds 9 at 1, want 0 to 8"),
        ("tokens", "<i4", [[], [-7]], "1: column tokens holds -7 at 0, want 0 to 8"),
        ("ref_top_ids", "<i4", [[[0, 1]], [[2, 10]]], "1: column ref_top_ids holds [2, 10] at 0"),
        ("loss_mask", "u1", [[0], [1, 1], [1, 2]], "2: column loss_mask holds 2 at 1, want 0 or 1"),
        ("rollout_logprobs", "<f4", [[0], [NAN]], "1: column rollout_logprobs holds nan at 0"),
        ("ref_logprobs", "<f4", [[0, np.inf]], "0: column ref_logprobs holds inf at 1"),
        ("ref_top_logprobs", "<f4", [[[0, 0], [0, NAN]]], "0: column ref_top_logprobs holds [0.0"),
        ("token_rewards", "<f4", [[0, NAN]], "0: column token_rewards holds nan at 1"),
        ("reward", "<f4", [[0], [-np.inf]], "1: column reward holds -inf at 0"),
        ("reward_times", "<f8", [[0, NAN]], "0: column reward_times holds nan at 1"),
        ("spans", "<i8", [span((0, 4)), span((0, 5))], "1: column spans holds [1, 0, 0, 5] at 0"),
        ("spans", "<i8", [span((-1, 2))], "0: column spans holds [1, 0, -1, 2] at 0"),
        ("spans", "<i8", [span((3, 2))], "0: column spans holds [1, 0, 3, 2] at 0"),
        ("spans", "<i8", [span((0, 3), (2, 4))], "0: column spans holds [1, 0, 2, 4] at 1"),
        ("spans", "<i8", [span((2, 4), (0, 2))], "0: column spans holds [1, 0, 0, 2] at 1"),
        ("spans", "<i8", [span((-(2**63), 2**63 - 1))], "0: column spans holds [1, 0, -922"),
    ],
)
def test_a_wrong_number_is_told_with_its_row_and_place(
    name: str, dtype: str, rows: list[Any], problem: str
) -> None:
    assert said(name, *rows, dtype=dtype).startswith(problem)


def test_where_nobody_knows_the_vocabulary_negative_tokens_are_refused_only() -> None:
    assert said("tokens", [2**31 - 1], dtype="<i4", vocabulary=0) == ""
    assert "holds -1 at 0, want 0 or more" in said("tokens", [-1], dtype="<i4", vocabulary=0)


@pytest.mark.parametrize(
    ("name", "good"),
    [
        ("response_text", "naïve ☃"),
        ("reward_components", json.dumps({"a": 1, "b": -0.5, "why": "it is so", "ok": True})),
        ("conversation", json.dumps([{"role": "user", "content": "\ud800"}])),
        ("posted_reward", ""),
        ("posted_reward", json.dumps({"score": 1.0, "components": {"a": 1.0}})),
        ("reward_inputs", json.dumps(["sums", None, {}, []])),
        ("parts", json.dumps([[0, []]])),
    ],
)
def test_texts_are_passed(name: str, good: str) -> None:
    assert said(name, good, good, good) == ""


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("reward_components", "{"),
        ("reward_components", ""),
        ("reward_components", "[]"),
        ("reward_components", '{"a": NaN}'),
        ("reward_components", '{"a": [1]}'),
        ("reward_components", '{"a": null}'),
        ("reward_components", '{"a": 1' + 400 * "0" + "}"),
        ("reward_components", 100_000 * "["),
        ("conversation", '["hello"]'),
        ("conversation", ""),
        ("posted_reward", '{"score": 1.0}'),
        ("posted_reward", '{"score": "much", "components": {}}'),
        ("posted_reward", '{"score": 1.0, "components": {"a": "b"}}'),
        ("posted_reward", '{"score": "much", "components": []}'),
        ("reward_inputs", "{}"),
        ("parts", "0"),
    ],
)
def test_json_of_another_form_is_named_by_its_row(name: str, bad: str) -> None:
    good = {"conversation": "[]", "parts": "[]", "reward_inputs": "[]", "posted_reward": ""}
    assert said(name, good.get(name, "{}"), bad).startswith(f"1: column {name} holds ")


@pytest.mark.parametrize("name", ["response_text", "replica", "reward_hash", "data_source"])
def test_a_letter_that_is_cut_between_two_rows_is_no_text_of_either(name: str) -> None:
    assert said(name, [0x61, 0xC3], [0xA4], dtype="u1").startswith(f"0: column {name} is no UTF-8")


def test_json_that_is_no_utf_8_is_none() -> None:
    half = [*b'{"\xed\xa0\x80": 1}']
    assert said("reward_components", half, dtype="u1").startswith("0: column reward_components")


def test_experts_of_other_tokens_are_named() -> None:
    column = RoutedExperts.pack(np.zeros((4, 1, 2), np.int32)).column
    assert said("routed_experts", column, dtype="u1") == ""
    assert "routed experts of 4 tokens" in said("routed_experts", column, dtype="u1", tokens=5)


def test_a_row_is_looked_at_column_by_column() -> None:
    row = {"tokens": np.arange(4, dtype=np.int32), "loss_mask": np.array([0, 1, 1, 3], np.uint8)}
    assert row_fault(row, vocabulary=9) == "column loss_mask holds 3 at 3, want 0 or 1"
    assert row_fault({"tokens": row["tokens"]}, vocabulary=3).startswith("column tokens holds 3")
    assert row_fault({"tokens": row["tokens"]}) == ""
