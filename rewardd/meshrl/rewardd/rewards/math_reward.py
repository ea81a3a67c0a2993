r"""MATH (Hendrycks et al. 2021, https://arxiv.org/abs/2103.03874): the last `\boxed{}`, compared as `math` does.

Under `conventions: verl` it is the metric of the paper: both sides are rewritten to one spelling (fractions, roots,
units, spaces) and compared as strings, so that \text{yes} is not yes. What has no such spelling stays as it is.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from meshrl.common import config
from meshrl.contract.types import Json
from meshrl.rewardd.rewards import _answers, _equality
from meshrl.rewardd.rewards._answers import Conventions, closing, said, wanted


class Config(config.Config):
    """The conventions of its answers."""

    conventions: Conventions = "meshrl"
    """`verl`: verl's numbers, its mistakes included."""


class NoSpellingError(Exception):
    """A string that has no normal spelling."""


SPELLINGS: tuple[tuple[str, str], ...] = (
    ("\n", ""),
    ("\\!", ""),
    ("\\\\", "\\"),
    ("tfrac", "frac"),
    ("dfrac", "frac"),
    ("\\left", ""),
    ("\\right", ""),
    ("^{\\circ}", ""),
    ("^\\circ", ""),
    ("\\$", ""),
)


prepare = _equality.prepare


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Json,
    extra_info: Json = None,
    config: Config = Config(),  # noqa: B008 - frozen
) -> float:
    """1 if the boxed answer is the ground truth, else 0.

    Raises:
        UserError: the ground truth is no answer.
    """
    truth = wanted(ground_truth, "math_reward")
    if config.conventions == "verl":
        answer = boxed_answer(solution_str)
        return float(answer is not None and equal(answer, truth))
    return float(_equality.is_right(_answers.boxed(said(solution_str)), truth))


def boxed_answer(text: str) -> str | None:
    r"""The content of the last box; `\boxed x` counts up to the next `$`, an `\fbox` does not count."""
    if "\\boxed " in text:
        return text.rpartition("\\boxed ")[2].partition("$")[0]
    start = text.rfind("\\boxed")
    if start < 0:
        return None
    end = closing(text, start)
    prefix = "\\boxed{"
    if end < 0 or not text.startswith(prefix, start):
        return None
    return text[start + len(prefix) : end]


def equal(left: str, right: str) -> bool:
    """Equal in their normal spelling; if one has none, equal as they are."""
    try:
        return normal(left) == normal(right)
    except NoSpellingError:
        return left == right


def normal(text: str) -> str:
    """The one spelling of an answer. Raises `NoSpellingError`."""
    for old, new in SPELLINGS:
        text = text.replace(old, new)
    text = _without_unit(text)
    text = text.replace("\\%", "").replace(" .", " 0.").replace("{.", "{0.")
    if not text:
        return text
    if text.startswith("."):
        text = "0" + text
    sides = text.split("=")
    if len(sides) == 2 and len(sides[0]) <= 2:  # "k = 5": the name is no part of the answer
        text = sides[1]
    text = _arguments(text, "\\sqrt", _root).replace(" ", "")
    text = _arguments(text, "\\frac", _fraction)
    return _slash("\\frac{1}{2}" if text == "0.5" else text)


def _without_unit(text: str) -> str:
    r"""The text before `\text{ unit}`."""
    parts = text.split("\\text{ ")
    if len(parts) > 2:
        raise NoSpellingError(text)
    return parts[0]


def _arguments(text: str, command: str, braced: Callable[[str], str | None]) -> str:
    """`text` with the arguments after each `command` in braces; unchanged if one has too few arguments."""
    head, *rest = text.split(command)
    for part in rest:
        written = braced(part)
        if written is None:
            return text
        head += command + written
    return head


def _root(rest: str) -> str:
    if not rest:
        raise NoSpellingError("a root of nothing")
    return rest if rest[0] == "{" else f"{{{rest[0]}}}{rest[1:]}"


def _fraction(rest: str) -> str | None:
    if not rest:
        raise NoSpellingError("a fraction of nothing")
    if rest[0] == "{":
        return rest
    if len(rest) < 2:
        return None
    over, under, tail = rest[0], rest[1], rest[2:]
    return f"{{{over}}}{under}{tail}" if under == "{" else f"{{{over}}}{{{under}}}{tail}"


def _slash(text: str) -> str:
    r"""`a/b` of two plain integers as `\frac{a}{b}`."""
    match = re.fullmatch(r"(0|-?[1-9]\d*)/(0|-?[1-9]\d*)", text, re.ASCII)
    return f"\\frac{{{match[1]}}}{{{match[2]}}}" if match else text
