"""Where the table `verl` reads an answer from: boxes, announcing words, the kinds of brackets."""

from __future__ import annotations

import pytest

from meshrl.rewardd.rewards import verl


@pytest.mark.parametrize(
    ("solution", "truth", "right", "prediction"),
    [
        (r"so \boxed{1,000}", "1000", True, "1,000"),
        (r"\boxed{ 12 }", "12", True, "12"),
        (r"\boxed{42} Answer: 7", "42", False, "7"),
        (r"Answer: 7, no: \boxed{42}", "42", True, "42"),
        (r"\boxed{42}" + "." * 1000, "42", True, "42"),
        ("none", "42", False, "[INVALID]"),
    ],
)
def test_dapo_reads_the_last_box_or_answer_line(
    solution: str, truth: str, right: bool, prediction: str
) -> None:
    wanted = {"score": 1.0 if right else -1.0, "acc": right, "pred": prediction}
    assert verl.compute_score("math_dapo", solution, truth) == wanted


@pytest.mark.parametrize(
    ("solution", "truth", "right", "prediction"),
    [
        (r"\boxed{42}", "42", True, "42"),
        (r"\boxed{\frac12}", r"\frac{1}{2}", False, r"\frac12"),
        (r"so \boxed{1,000}", "1000", False, "1,000"),
        (r"\boxed{4}", r"\boxed{4}", False, "4"),
        ("Answer: 1,000", "1000", True, "1000"),
        ("no box", "4", False, "[INVALID]"),
    ],
)
def test_under_verls_conventions_dapo_compares_a_box_character_for_character(
    solution: str, truth: str, right: bool, prediction: str
) -> None:
    wanted = {"score": 1.0 if right else -1.0, "acc": right, "pred": prediction}
    options = verl.Config(conventions="verl")
    for data_source in ("math_dapo", "aime_2024"):
        assert verl.compute_score(data_source, solution, truth, config=options) == wanted


@pytest.mark.parametrize(
    ("solution", "truth", "score"),
    [
        ("The answer is 42.", "42", 1.0),
        ("ANSWER: 3\nAnswer: 4", "4", 1.0),
        ("7 is the answer", "7", 1.0),
        ("so it must be 5", "5", 1.0),
        ("It is 4. Or so I think", "4", 1.0),
        (r"The answer is 3, \boxed{4}", "4", 1.0),
        (r"\boxed{4} so the answer is 3", "4", 0.0),
        ("no box 4", "4", 0.0),
        (r"\boxed{[1,2]}", "(1,2)", 0.0),
        (r"\boxed{(1,2)}", "[1,2]", 0.0),
        (r"\boxed{(1,2)}", "1,2", 1.0),
        (r"\boxed{1,2}", "(1,2)", 1.0),
    ],
)
def test_numina_reads_the_announced_answer_and_tells_intervals_apart(
    solution: str, truth: str, score: float
) -> None:
    options = verl.Config(conventions="verl")
    assert verl.compute_score("numina_olympiads", solution, truth, config=options) == score
