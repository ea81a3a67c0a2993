r"""Geometry3K: 0.9 for the right answer, 0.1 for `<think>…</think>…\boxed{…}`."""

from __future__ import annotations

from meshrl.common import config
from meshrl.contract.types import Json
from meshrl.rewardd.rewards import _answers, _equality, prime_math
from meshrl.rewardd.rewards._answers import Conventions, last_boxed, said, wanted

REQUIRES = ("sympy", "mpmath")
FORM = ("</think>", "\\boxed{", "}")
"""Marks after `<think>`, in this order, with any text between them."""


class Config(config.Config):
    """How much the form is worth."""

    format_score: float = 0.1
    """The share of the form; the answer has the rest."""
    conventions: Conventions = "meshrl"
    """`verl`: verl's numbers, its mistakes included."""


prepare = prime_math.prepare


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Json,
    extra_info: Json = None,
    config: Config = Config(),  # noqa: B008 - frozen
) -> float:
    """`(1 - format_score) · right + format_score · formed`.

    Raises:
        UserError: the ground truth is no answer.
    """
    truth = wanted(ground_truth, "geo3k")
    if config.conventions == "verl":
        boxed = last_boxed(solution_str)
        right = boxed is not None and prime_math.simple_equal(boxed, truth)
    else:
        right = _equality.is_right(_answers.boxed(said(solution_str)), truth)
    formed = is_formed(solution_str)
    return (1 - config.format_score) * right + config.format_score * formed


def is_formed(text: str) -> bool:
    """Whether it is a thought, then a box, with anything around the box."""
    at = len("<think>") if text.startswith("<think>") else -1
    for mark in FORM:
        found = text.find(mark, at) if at >= 0 else -1
        at = found + len(mark) if found >= 0 else -1
    return at >= 0
