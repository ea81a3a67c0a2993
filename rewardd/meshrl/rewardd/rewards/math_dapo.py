r"""DAPO's scorer: the last `Answer: …` or box, whichever is later, compared as `math` does; +1 or -1.

Under `conventions: verl` the line is looked for in the last 300 characters and a box, without one, in the last 100; a
box must be the ground truth, character for character, and a line after normalisation, which follows Lewkowycz et al.
2022 (Minerva, https://arxiv.org/abs/2206.14858, appendix D.1). The scores after https://arxiv.org/abs/2503.14476.
"""

from __future__ import annotations

import re

from meshrl.common import config
from meshrl.contract.types import Json
from meshrl.rewardd.rewards import _answers, _equality
from meshrl.rewardd.rewards._answers import Conventions, closing, last_boxed, said, wanted

TAIL = 300
BOX_TAIL = 100
ANSWER = re.compile(r"(?i)answer\s*:\s*([^\n]+)")
LINE = re.compile(r"\banswers?[\s*_]*[:：][\s*_]*", re.IGNORECASE)
INVALID = "[INVALID]"

REPLACED: tuple[tuple[str, str], ...] = (
    ("an ", ""),
    ("a ", ""),
    (".$", "$"),
    ("\\$", ""),
    (r"\ ", ""),
    (" ", ""),
    ("mbox", "text"),
    (",\\text{and}", ","),
    ("\\text{and}", ","),
    ("\\text{m}", "\\text{}"),
)
UNITS = (
    "square ways integers dollars mph inches hours km units \\ldots sue points feet minutes digits cents degrees cm "
    "gm pounds meters meals edges students childrentickets multiples"
)
MARKUP = r'\text{} \mathrm{th} ^\circ ^{\circ} \; ,\! {,} " \dots'
TEXTS = ("\\text{s}", "\\text{.}", "\\text{\ns}", "\\text{}^2", "\\text{}^3", "\\text{\n}")
DROPPED = (*UNITS.split(), *TEXTS, *MARKUP.split())
"""Units and markup that Minerva's normalisation drops, in its order: the order matters."""
UNWRAPPED: tuple[tuple[str, str], ...] = (
    (r"(.*?)(\$)(.*?)(\$)(.*)", r"$\3$"),
    (r"(\\text\{)(.*?)(\})", r"\2"),
    (r"(\\textbf\{)(.*?)(\})", r"\2"),
    (r"(\\overline\{)(.*?)(\})", r"\2"),
    (r"(\\boxed\{)(.*)(\})", r"\2"),
    (r"(frac)([^{])(.)", r"frac{\2}{\3}"),
    (r"(sqrt)([^{])", r"sqrt{\2}"),
)


class Config(config.Config):
    """The conventions of its answers."""

    conventions: Conventions = "meshrl"
    """`verl`: verl's numbers, its mistakes included."""


prepare = _equality.prepare


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Json,
    extra_info: Json = None,
    config: Config = Config(),  # noqa: B008 - frozen
) -> dict[str, Json]:
    """`score` +1 or -1, `acc` whether it is right, `pred` the answer that was read.

    Raises:
        UserError: the ground truth is no answer.
    """
    truth = wanted(ground_truth, "math_dapo")
    if config.conventions == "meshrl":
        found = stated(said(solution_str))
        right = _equality.is_right(found, truth)
        return {"score": 1.0 if right else -1.0, "acc": right, "pred": found or INVALID}
    tail = solution_str[-TAIL:]
    answers = ANSWER.findall(tail)
    found = answers[-1] if answers else last_boxed(tail[-BOX_TAIL:], ("\\boxed{",))
    if not answers and found is not None:
        prediction, right = found, found == truth
    else:
        prediction = INVALID if found is None else normal(found)
        right = prediction == normal(truth)
    return {"score": 1.0 if right else -1.0, "acc": right, "pred": prediction}


def stated(response: str) -> str | None:
    """The answer after the last `Answer:`, or in a box that is later; None without one."""
    at = max((match.end() for match in LINE.finditer(response)), default=-1)
    box = response.rfind("\\boxed")
    if at < 0 or box >= at or (box >= 0 and closing(response, box) >= at):  # or the line is in it
        return _answers.boxed(response)
    return _answers.sentence(response[at:]) or None


def normal(answer: str) -> str:
    """The answer without words, units and markup."""
    answer = answer.rpartition("=")[2]
    for old, new in REPLACED:
        answer = answer.replace(old, new)
    for expression in DROPPED:
        answer = answer.replace(expression, "")
    for pattern, kept in UNWRAPPED:
        answer = re.sub(pattern, kept, answer)
    answer = answer.replace("$", "")
    digits = answer.replace(",", "")
    return (digits if digits.isdigit() else answer).strip()
