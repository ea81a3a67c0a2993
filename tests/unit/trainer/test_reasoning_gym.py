"""Prompts of reasoning-gym: the same in every process, mixed by weight, none both in training and held out."""

from __future__ import annotations

import runpy
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from meshrl.contract.errors import ConfigError
from meshrl.trainer.config import DataConfig
from meshrl.trainer.data.prompts import read_prompt_row
from meshrl.trainer.data.reasoning_gym import (
    ReasoningGymConfig,
    _make,
    _Refusal,
    check,
    gym_rows,
    shares,
)


def config(tasks: dict[str, Any], **options: Any) -> ReasoningGymConfig:
    return ReasoningGymConfig.model_validate({"tasks": tasks, "size": 24, "val_size": 6, **options})


def made(given: ReasoningGymConfig, wanted: str = "train") -> list[Any]:
    """The maker without the process around it."""
    return list(_make(given, wanted))


def test_a_task_that_draws_from_a_set_makes_the_same_rows_in_every_process() -> None:
    given = config({"ransom_note": {}, "chain_sum": {"weight": 3}})
    first, second = (list(gym_rows(given, held_out=False)) for _ in range(2))
    assert first == second
    assert Counter(row.values["data_source"] for row in first) == {
        "chain_sum": 18,
        "ransom_note": 6,
    }
    read = read_prompt_row(first[0], DataConfig(answer_required=True))
    assert [message.role for message in read.prompt] == ["system", "user"]  # type: ignore[union-attr]


def test_no_held_out_question_is_asked_in_training_or_twice() -> None:
    easy = {"config": {"min_terms": 2, "max_terms": 2, "max_digits": 1}}
    given = config({"chain_sum": easy}, size=100, val_size=20, levels=1)
    train, held_out = (
        [row["prompt"][-1]["content"] for row in made(given, w)] for w in ("train", "held_out")
    )
    assert len(train) == 100 and len(held_out) == len(set(held_out)) == 20
    assert not set(train) & set(held_out)


def test_each_level_gives_its_share_and_is_the_difficulty_of_its_rows() -> None:
    rows = made(config({"chain_sum": {}}, size=10, levels=3, chat=False, system_prompt=""))
    levels = Counter(row["extra_info"]["difficulty"] for row in rows)
    assert levels == {0: 4, 1: 3, 2: 3}
    longest = {level: 0 for level in levels}
    for row in rows:
        assert isinstance(row["prompt"], str)
        level = row["extra_info"]["difficulty"]
        longest[level] = max(longest[level], len(row["prompt"]))
    assert longest[0] < longest[2]


def test_parts_are_as_large_as_their_weights() -> None:
    assert shares([1, 2, 1], 7) == [2, 3, 2]
    assert shares([1, 1, 1], 0) == [0, 0, 0]
    assert shares([1.0], 5) == [5]


@pytest.mark.parametrize(
    ("tasks", "options", "says"),
    [
        ({"chain_sums": {}}, {}, "tasks.chain_sums: .* did you mean 'chain_sum'"),
        ({"composite": {}}, {}, "no such task"),
        ({"gcd": {"config": {"most": 3}}}, {}, "no option 'most' .it takes: max_numbers"),
        ({"gcd": {"config": {"min_numbers": 0}}}, {}, "tasks.gcd.config: min_numbers"),
        ({"gsm_symbolic": {}}, {"levels": 2}, "gsm_symbolic has no levels"),
        ({"calendar_arithmetic": {"config": {"tasks": ["no_such"]}}}, {}, "tasks.calendar"),
        (
            {"gcd": {"config": {"max_numbers": 2, "max_value": 2}}},
            {},
            "only 0 questions .* of 6: lower size",
        ),
    ],
)
def test_what_cannot_be_made_is_said_in_one_line(
    tasks: dict[str, Any], options: dict[str, Any], says: str
) -> None:
    with pytest.raises(_Refusal, match=says) as refused:
        made(config(tasks, **options), "held_out")
    assert "\n" not in str(refused.value)


def test_a_refusal_crosses_the_process() -> None:
    with pytest.raises(
        ConfigError, match=r"^data\.reasoning_gym: tasks\.gcd\.config: no option 'most'"
    ):
        check(config({"gcd": {"config": {"most": 3}}}))


@pytest.mark.parametrize(
    "name", ["boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"]
)
def test_a_task_without_answers_is_refused_by_name(name: str) -> None:
    with pytest.raises(ValidationError, match=f"rows of {name} have no answer to score"):
        config({name: {}, "gcd": {}})


@pytest.mark.parametrize(
    ("task", "question", "work"),
    [
        ("chain_sum", "State … problem: 5 + 8 - 13 =", "5+8=13 13-13=0"),
        ("chain_sum", "State … problem: 1 - 5 =", "1-5=-4"),
        ("simple_equations", "Solve for e: 5 - 8*e = -51", "-51-5=-56 -56/-8=7"),
        ("simple_equations", "Solve for s: s - 3 = 11", "11+3=14 14/1=14"),
        ("simple_equations", "Solve for s: 9 - s = 5", "5-9=-4 -4/-1=4"),
        ("simple_equations", "Solve for h: 24*h = 192", "192/24=8"),
        ("spell_backward", "Spell … (example: sun -> nus): moon", "1m2o3o4n 4n3o2o1m"),
    ],
)
def test_the_tiny_recipe_shows_how_an_answer_is_worked_out(
    task: str, question: str, work: str
) -> None:
    recipe = runpy.run_path(str(Path(__file__).parents[3] / "recipes/reasoning_gym/prepare.py"))
    assert recipe["WORKED"][task](question) == work
