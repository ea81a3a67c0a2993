"""Rewards that come with meshrl read what a policy samples in linear work, and never fail on it.

A text that takes too long is a timeout, and one on which a reward raises is a fault: both would be tried again and
become dead letters, where a bad answer should have a score.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any

import pytest

from meshrl.rewardd.rewards import geo3k, prime_math, search_qa, tool_use
from meshrl.rewardd.rewards._answers import blocks

from ..rollout.test_linear_parsers import LENGTH, PER_CHARACTER, Counted

MARKS = ("<answer>", "</answer>", "<tool_call>", "</tool_call>", "<think>", "</think>")
PIECES = (*MARKS, "\\boxed{", "}", "\n", " ", "x", "<")
PARSERS: dict[str, Callable[[str], Any]] = {
    "geo3k": geo3k.is_formed,
    "search_qa": lambda text: list(blocks(text, "<answer>", "</answer>")),
    "tool_use": lambda text: list(blocks(text, "<tool_call>", "</tool_call>")),
}


def hostile(length: int = LENGTH) -> list[str]:
    draw = random.Random(1)
    units = [*PIECES, *("".join(draw.choices(PIECES, k=draw.randint(2, 4))) for _ in range(60))]
    texts = [first + unit * (length // len(unit)) for first in ("", *MARKS) for unit in units]
    return texts + ["".join(draw.choices(PIECES, k=length // 8)) for _ in range(20)]


@pytest.mark.parametrize("name", PARSERS)
def test_the_work_grows_no_faster_than_the_text(name: str) -> None:
    for text in hostile():
        Counted.work = 0
        PARSERS[name](Counted(text))
        assert Counted.work <= PER_CHARACTER * len(text) + 1000, text[:80]


def test_no_such_reward_looks_for_marks_with_a_regular_expression() -> None:
    for module in (geo3k, search_qa, tool_use):
        patterns = [p.pattern for p in vars(module).values() if isinstance(p, re.Pattern)]
        assert not [pattern for pattern in patterns if ".*" in pattern], module.__name__


def test_they_find_what_regular_expressions_find() -> None:
    formed = re.compile(r"<think>.*</think>.*\\boxed\{.*\}.*", re.DOTALL)
    answers = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
    draw = random.Random(2)
    found = 0
    for _ in range(3000):
        text = "".join(draw.choices(PIECES, k=draw.randint(1, 12)))
        text = "<think>" * draw.randint(0, 1) + text
        found += geo3k.is_formed(text)
        assert geo3k.is_formed(text) == (formed.fullmatch(text) is not None), text
        assert list(blocks(text, "<answer>", "</answer>")) == answers.findall(text), text
    assert found > 30


def test_calls_are_found_beside_marks_that_nothing_closes() -> None:
    call = '<tool_call>\n{"name": "f", "parameters": {"a": 1}}\n</tool_call>'
    score = tool_use.compute_score("", "<tool_call>" * 3 + call[11:], call)
    assert score["accuracy_score"] == -3.0  # the first mark has the others in its block
    assert tool_use.compute_score("", call + "<tool_call>", call)["accuracy_score"] == 3.0


@pytest.mark.parametrize("text", ["%" * LENGTH, "5" + "\\%" * 5000, "5%%"])
def test_percent_signs_without_end_are_no_number(text: str) -> None:
    assert not prime_math.lenient_equal(text, "5", 3.14)


def test_one_percent_sign_is_a_hundredth() -> None:
    assert prime_math.lenient_equal("50\\%", "0.5", 3.14)
    assert prime_math.lenient_equal("50 ", "1/2", 3.14) is False


def test_an_answer_far_longer_than_the_truth_is_not_rewritten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def rewrite(text: str) -> str:
        raise AssertionError(f"{len(text)} characters are rewritten")

    monkeypatch.setattr(prime_math, "plain", rewrite)
    nested = "\\frac{" * (LENGTH // 6)
    for response in (nested, f"\\boxed{{{nested}", f"\\boxed{{1{nested}{'}' * len(nested)}}}"):
        for conventions in ("meshrl", "verl"):
            prime, geo = (m.Config(conventions=conventions) for m in (prime_math, geo3k))
            assert prime_math.compute_score("", response, "2", config=prime) == 0.0
            assert geo3k.compute_score("", response, "2", config=geo) == 0.0
    long = "\\frac{1}{2}+" * 500 + "1"
    assert prime_math.compute_score("", f"\\boxed{{{long}}}", long) == 1.0
