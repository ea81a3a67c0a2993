"""The built-in rewards: public parity pairs, and the cases that each one's page describes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from meshrl.contract.errors import ConfigError, UserError
from meshrl.contract.types import Outcome, Sample, Uid
from meshrl.rewardd.config import RewardConfig
from meshrl.rewardd.judge import build_judge
from meshrl.rewardd.rewards import _equality, format, gsm8k, length, math, prime_math, verl

GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "rewards.json").read_text())
VERL = verl.Config(conventions="verl")


@pytest.mark.parametrize("case", GOLDEN, ids=range(len(GOLDEN)))
def test_a_public_pair_has_its_score(case: dict[str, Any]) -> None:
    solution, truth = case["solution_str"], case["ground_truth"]
    result = verl.compute_score(case["data_source"], solution, truth, config=VERL)
    assert result == case["result"]


async def test_the_public_pairs_have_their_scores_through_the_processes() -> None:
    by_verl = {"name": "verl", "kwargs": {"conventions": "verl"}}
    judge = build_judge(RewardConfig.model_validate({"functions": [by_verl], "workers": 2}))
    samples = [
        Sample(
            uid=Uid("run", "golden", index),
            data_source=case["data_source"],
            solution=case["solution_str"],
            ground_truth=case["ground_truth"],
            extra_info={},
        )
        for index, case in enumerate(GOLDEN)
    ]
    scores = await judge.score(samples)
    await judge.close()
    wanted = [
        c["result"]["score"] if isinstance(c["result"], dict) else c["result"] for c in GOLDEN
    ]
    assert [s.outcome for s in scores] == [Outcome.OK] * len(GOLDEN)
    assert [s.score for s in scores] == wanted
    accuracies = [
        (c["result"], s)
        for c, s in zip(GOLDEN, scores, strict=True)
        if isinstance(c["result"], dict)
    ]
    assert accuracies
    for result, score in accuracies:
        assert score.components == {"verl": result["score"], "acc": float(result["acc"])}


def test_gsm8k_flexible_takes_the_last_number_and_pays_for_the_form() -> None:
    config = gsm8k.Config(method="flexible", format_score=0.1, conventions="verl")
    assert gsm8k.compute_score("", "it is 42.", "42.", config=config) == 1.0
    assert gsm8k.compute_score("", "5 apples . , .", "6", config=config) == 0.1
    assert gsm8k.compute_score("", "none", "5", config=config) == 0.0


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('false')",
        "x.__class__",
        "().__class__",
        "lambda: 1",
        "9^9^9^9",
        "9**9**9",
        "2^1000",
        "99999!",
        "a" * 1000,
    ],
)
def test_algebra_refuses_what_could_act_or_explode(text: str) -> None:
    assert prime_math.parse(text) is None


def test_a_name_that_python_knows_is_a_symbol_for_algebra() -> None:
    assert str(prime_math.parse("exit")) == "e*i*t*x"
    assert prime_math.arithmetic("2*3.14 + 1") == pytest.approx(7.28)
    assert prime_math.arithmetic("open('x')") is None


def test_a_data_source_without_a_scorer_is_an_error_and_not_scored() -> None:
    with pytest.raises(UserError, match="no scorer for data_source 'mine'"):
        verl.compute_score("mine", "", "")
    with pytest.raises(ConfigError, match="runs programs that a model wrote"):
        verl.compute_score("codecontests", "", "")
    assert verl.compute_score("aime_2031", "Answer: 4", "4") == {
        "score": 1.0,
        "acc": True,
        "pred": "4",
    }


def test_geometry_pays_a_tenth_for_the_form() -> None:
    response = r"<think>hm</think> \boxed{4}"
    assert verl.compute_score("hiyouga/geometry3k", response, "4") == pytest.approx(1.0)
    assert verl.compute_score("hiyouga/geometry3k", response, "5") == pytest.approx(0.1)
    assert verl.compute_score("hiyouga/geometry3k", r"\boxed{4}", "4") == pytest.approx(0.9)


def test_math_can_insist_on_a_box() -> None:
    boxed = math.Config(boxed_only=True)
    assert math.compute_score("", "it is 3", "3", config=boxed) == 0.0
    assert math.compute_score("", r"it is \boxed{3}", "3", config=boxed) == 1.0


def test_math_without_its_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "math_verify", None)
    monkeypatch.setitem(__import__("sys").modules, "mpmath", None)
    _equality._context.cache_clear()
    config = math.Config(conventions="verl")
    with pytest.raises(ConfigError, match=r"pip install 'meshrl\[rewards\]'"):
        math.prepare()
    with pytest.raises(ConfigError, match=r"pip install 'meshrl\[rewards\]'"):
        math.compute_score("", r"\boxed{1}", "1", config=config)


def test_format_wants_each_tag_once_and_in_order() -> None:
    config = format.Config(penalty=-1.0)
    good = "<think>a</think>\n<answer>b</answer>"
    assert format.compute_score("", good, None, config=config) == 1.0
    for bad in (
        "<answer>b</answer><think>a</think>",
        good + " and more",
        good + good,
        "<think>a</think>",
        "<think>a<answer>b</think></answer>",
    ):
        assert format.compute_score("", bad, None, config=config) == -1.0
    pattern = format.Config(pattern=r"\d+\n\d+")
    assert format.compute_score("", "1\n2", None, config=pattern) == 1.0
    assert format.compute_score("", "1\n2 ", None, config=pattern) == 0.0


def test_length_punishes_the_overlong_part_linearly() -> None:
    config = length.Config(max_length=100, buffer=20, factor=0.5)

    def penalty(tokens: int) -> float:
        info = {"response_length": tokens}
        return length.compute_score("", "", None, info, config=config)["score"]

    assert [penalty(n) for n in (0, 80, 90, 100, 120)] == [0, 0, -0.25, -0.5, -1.0]
    characters = length.Config(max_length=2, buffer=1, unit="characters")
    assert length.compute_score("", "ab", None, config=characters)["score"] == -1.0
    with pytest.raises(UserError, match="no response_length"):
        length.compute_score("", "ab", None, {}, config=config)
