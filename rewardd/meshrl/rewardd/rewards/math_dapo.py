r"""DAPO's scorer: `Answer: …` in the last 300 characters, else a box in the last 100; +1 or -1.

Normalisation after Lewkowycz et al. 2022 (Minerva, https://arxiv.org/abs/2206.14858, appendix D.1); the scores after
https://arxiv.org/abs/2503.14476.
"""

from __future__ import annotations

import re
from typing import Literal

from meshrl.contract import config
from meshrl.contract.types import Json
from meshrl.rewardd.rewards._latex import last_boxed

TAIL = 300
BOX_TAIL = 100
ANSWER = re.compile(r"(?i)answer\s*:\s*([^\n]+)")
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
    """How a box is compared."""

    conventions: Literal["meshrl", "verl"] = "meshrl"
    r"""`meshrl`: a box is normalised as an answer line is; `verl`: its content must be the ground truth, character
    for character, so that `\boxed{\frac12}` is wrong where the truth is `\frac{1}{2}`."""


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Json,
    extra_info: Json = None,
    config: Config = Config(),  # noqa: B008 - frozen
) -> dict[str, Json]:
    """`score` +1 or -1, `acc` whether it is right, `pred` the answer that was read."""
    tail, truth = solution_str[-TAIL:], str(ground_truth)
    answers = ANSWER.findall(tail)
    found = answers[-1] if answers else last_boxed(tail[-BOX_TAIL:], ("\\boxed{",))
    if config.conventions == "verl" and not answers and found is not None:
        prediction, right = found, found == truth
    else:
        prediction = INVALID if found is None else normal(found)
        right = prediction == normal(truth)
    return {"score": 1.0 if right else -1.0, "acc": right, "pred": prediction}


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
