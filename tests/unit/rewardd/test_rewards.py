"""The built-in rewards: public parity pairs, and the cases that each one's page describes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from meshrl.contract.errors import ConfigError, UserError
from meshrl.contract.types import Json, Outcome, Sample, Uid
from meshrl.rewardd.config import RewardConfig
from meshrl.rewardd.judge import build_judge
from meshrl.rewardd.rewards import (
    _equality,
    exact_match,
    format,
    gsm8k,
    length,
    math,
    math_dapo,
    math_reward,
    prime_math,
    search_qa,
    verl,
)

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


@pytest.mark.parametrize(
    ("solution", "truth", "score"),
    [
        ("so\n#### 42", "42", 1.0),
        ("#### 1,234", "1234", 1.0),
        ("#### -7", "-7", 1.0),
        ("#### 42.0", "42", 0.0),
        ("#### 18.", "18", 0.0),
        ("#### $12", "12", 0.0),
        ("####42", "42", 0.0),
        ("42", "42", 0.0),
        ("#### 1 then #### 2", "2", 1.0),
        ("#### 42" + " x" * 200, "42", 0.0),
    ],
)
def test_under_verls_conventions_gsm8k_compares_the_last_marked_number_as_text(
    solution: str, truth: str, score: float
) -> None:
    config = gsm8k.Config(conventions="verl")
    assert gsm8k.compute_score("openai/gsm8k", solution, truth, config=config) == score


def test_gsm8k_flexible_takes_the_last_number_and_pays_for_the_form() -> None:
    config = gsm8k.Config(method="flexible", format_score=0.1, conventions="verl")
    assert gsm8k.compute_score("", "it is 42.", "42.", config=config) == 1.0
    assert gsm8k.compute_score("", "5 apples . , .", "6", config=config) == 0.1
    assert gsm8k.compute_score("", "none", "5", config=config) == 0.0


@pytest.mark.parametrize(
    ("solution", "truth", "score"),
    [
        (r"\boxed{0.5}", r"\frac{1}{2}", 1.0),
        (r"\boxed{1/2}", "0.5", 1.0),
        (r"\boxed{\dfrac12}", r"\frac{1}{2}", 1.0),
        (r"\boxed{10\%}", "10", 1.0),
        (r"\boxed{\sqrt3}", r"\sqrt{3}", 1.0),
        (r"\boxed{5\text{ cm}}", "5", 1.0),
        (r"\boxed{\text{yes}}", "yes", 0.0),
        (r"\fbox{9}", "9", 0.0),
        (r"\boxed 7$ end", "7", 1.0),
        (r"\boxed{1} or \boxed{2}", "1", 0.0),
        (r"\boxed{.5}", "0.5", 1.0),
        (r"\boxed{\frac}", r"\frac", 1.0),
        ("7", "7", 0.0),
        (r"\boxed{", "x", 0.0),
    ],
)
def test_under_verls_conventions_math_reward_compares_spellings(
    solution: str, truth: str, score: float
) -> None:
    config = math_reward.Config(conventions="verl")
    assert math_reward.compute_score("lighteval/MATH", solution, truth, config=config) == score


@pytest.mark.parametrize(
    ("solution", "truth", "right", "prediction"),
    [
        ("Answer: $42$", "42", True, "42"),
        ("ANSWER : x = 7", "7", True, "7"),
        ("Answer: 1,000 dollars", "1000", True, "1000"),
        (r"Answer: \boxed{\frac12}", r"\frac{1}{2}", True, r"\frac{1}{2}"),
        (r"Answer: \text{yes}", "yes", True, "yes"),
        (r"\boxed{42}" + " " * 120, "42", False, "[INVALID]"),
        ("42", "42", False, "[INVALID]"),
    ],
)
def test_under_verls_conventions_math_dapo_reads_the_answer_line(
    solution: str, truth: str, right: bool, prediction: str
) -> None:
    config = math_dapo.Config(conventions="verl")
    result = math_dapo.compute_score("math_dapo", solution, truth, config=config)
    assert result == {"score": 1.0 if right else -1.0, "acc": right, "pred": prediction}


@pytest.mark.parametrize(
    ("solution", "truth", "score"),
    [
        (r"\boxed{0.5}", r"\frac{1}{2}", 1.0),
        (r"\boxed{2\pi}", r"2\pi", 1.0),
        (r"\boxed{6.28}", r"2\pi", 1.0),
        (r"\boxed{6.2831853}", r"2\pi", 1.0),
        (r"\boxed{x^2+2x+1}", "(x+1)^2", 1.0),
        (r"\boxed{\frac{\sqrt{2}}{2}}", r"\frac{1}{\sqrt{2}}", 1.0),
        (r"\boxed{(1, 2)}", "(1,2)", 1.0),
        (r"\boxed{(1, 3)}", "(1,2)", 0.0),
        (r"\boxed{[1, 2)}", "(1,2]", 0.0),
        (r"\boxed{1,000}", "1000", 1.0),
        (r"\boxed{50\%}", "50", 1.0),
        (r"\boxed{5}", "4", 0.0),
        (r"\boxed{}", "4", 0.0),
        (r"\fbox{4}", "4", 1.0),
        ("4", "4", 1.0),
        ("it is 4", "4", 1.0),
        ("it is x", "4", 0.0),
    ],
)
def test_under_verls_conventions_prime_math_grades_by_algebra(
    solution: str, truth: str, score: float
) -> None:
    config = prime_math.Config(conventions="verl")
    assert prime_math.compute_score("numina_olympiads", solution, truth, config=config) == score


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


@pytest.mark.parametrize(
    ("solution", "target", "score"),
    [
        ("<answer>The  Eiffel-Tower!</answer>", ["eiffeltower"], 1.0),
        ("<answer>Paris</answer>", "paris", 1.0),
        ("<answer>Paris</answer>" * 11, "paris", 0.25),
        ("<answer>Paris</answer>" * 10, "paris", 1.0),
        ("<answer>Paris</answer><answer>Rome</answer>", "paris", 0.0),
        ("<answer>Paris", "paris", 0.0),
    ],
)
def test_under_verls_conventions_search_qa_matches_the_last_answer(
    solution: str, target: Json, score: float
) -> None:
    config = search_qa.Config(conventions="verl")
    truth = {"target": target}
    assert search_qa.compute_score("searchR1_nq", solution, truth, config=config) == score


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


@pytest.mark.parametrize(
    ("solution", "truth", "score"),
    [
        (r"so \boxed{\frac{1}{2}}", "0.5", 1.0),
        ("the answer is $x = 3$", "3", 1.0),
        (r"\boxed{\{1, 2\}}", r"\{2, 1\}", 1.0),
        (r"\boxed{7}", "8", 0.0),
        ("I do not know", "8", 0.0),
    ],
)
def test_math_verifies_by_value(solution: str, truth: str, score: float) -> None:
    assert math.compute_score("", solution, truth) == score


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


def test_exact_match_finds_the_answer_and_compares_it() -> None:
    after, either = exact_match.Config(after="#"), exact_match.Config(ignore_case=True)
    number = exact_match.Config(pattern=r"= (\d+)")
    assert exact_match.compute_score("", "q=3;s=6#6 ", 6, config=after) == 1.0
    assert exact_match.compute_score("", "6", "6", config=after) == 0.0
    assert exact_match.compute_score("", " Yes", ["no", "yes"], config=either) == 1.0
    assert exact_match.compute_score("", "x = 1, y = 22", "22", config=number) == 1.0
    assert exact_match.compute_score("", "none", "22", config=number) == 0.0


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
