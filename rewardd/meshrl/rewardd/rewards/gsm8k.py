"""GSM8K: the number after the last `####`, compared by value.

The format is the data set's own (Cobbe et al. 2021, https://arxiv.org/abs/2110.14168). Under `conventions: verl` the
mark is looked for in the last 300 characters and the number compared as text: "42.0" is not "42", "$12" no number.
"""

from __future__ import annotations

import re
import unicodedata
from fractions import Fraction
from typing import Literal

from meshrl.common import config
from meshrl.contract.errors import UserError
from meshrl.contract.types import Json
from meshrl.rewardd.rewards import _answers
from meshrl.rewardd.rewards._answers import Conventions, said, wanted

TAIL = 300
"""Only this many characters from the end are searched: an answer before them is not the final one."""
MARKED = re.compile(r"#### (-?[0-9.,]+)")
NUMBER = re.compile(r"-?[0-9.,]+")
RAISED = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹]")
LOWERED = re.compile("[₀₁₂₃₄₅₆₇₈₉]")
VULGAR = re.compile("[¼-¾⅐-⅞]")
EXPONENT = re.compile(r"[\^_]\d+")
HASHES = re.compile(r"(?<!#)####(?!#)")
SPACED = re.compile(r"(?<![\d.,/])[1-9]\d{0,2}(?: \d{3}){1,6}(?![\d/.,]| \d)")
MOST_CHARACTERS = 400
"""Most characters that are read after a mark: an answer is short."""
LEAD = re.compile(
    r"^(?:[\s*_`:({\[$]|\\\(|\\\[|\\(?:boxed|text|mathbf|textbf)\{|"
    r"(?:the|final|answer|is|USD|EUR|GBP)\b|[a-zA-Z][a-zA-Z ]{0,30}[:=]|['\"“‘])+",
    re.IGNORECASE,
)
"""Characters allowed between the mark and the number."""
GROUPED = r"\d{1,3}(?:,\d{3})+(?!\d)|\d{1,2}(?:,\d{2})+,\d{3}(?!\d)|\d+"
VALUE = re.compile(
    rf"([-+]?\s*[$€£]?\s*[-+]?)\s*(?:(?:(\d{{1,9}})\s+)?(?:\\[dt]?frac\{{)?(\d{{1,9}})(?:/|\}}\{{)(\d{{1,9}})\}}?(?![\d/])"
    rf"|((?:(?:{GROUPED})(?:\.\d+)?|\.\d+))(?![\d]|[.,]\d)([eE][-+]?\d{{1,3}})?)"
)
"""Sign; whole, over and under of a fraction; digits; power of ten."""
PLAIN = re.compile(r"-?[$€£]?(?:\d[\d,]*(?:\.\d+)?|\.\d+)%?")
HEDGED = re.compile(
    r"[ \t]+[$€£]?\d|[\s%°()\]}*$]*(?:\b[a-zA-Z]{1,12}\s*)?(?:,\s|\bor\b|\band\b|\bto\b"
    r"|\b(?:x|times|plus|minus|(?:divided|multiplied) by)\b|[-+–/&;~^_×*:])\s*"
    r"(?:maybe |perhaps |possibly )?[-+$€£]?\s*\.?\d",
    re.IGNORECASE,
)
"""Makes one number a range, a sum or one of two."""
GLUED = re.compile(r"(?:th|st|nd|rd|bn|mn|[kKMBxX])(?![a-zA-Z])")
"""Suffixes that make a number another one, or none."""
PERCENT = re.compile(r"\s*(?:%|per ?cent\b)", re.IGNORECASE)
SCALES = {"hundred": 100, "thousand": 1000, "million": 10**6, "billion": 10**9, "dozen": 12}
SCALE = re.compile(rf"\s*({'|'.join(SCALES)})\b", re.IGNORECASE)


class Config(config.Config):
    """Accepted forms of the answer, and its scores."""

    method: Literal["strict", "flexible"] = "strict"
    """`strict`: the last `#### number`; `flexible`: without one the last box, else the last number."""
    format_score: float = 0.0
    """Score of a wrong answer in the right form."""
    score: float = 1.0
    """Score of the right answer."""
    conventions: Conventions = "meshrl"
    """`verl`: verl's numbers, its mistakes included."""


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Json,
    extra_info: Json = None,
    config: Config = Config(),  # noqa: B008 - frozen
) -> float:
    """`score` if the answer is the ground truth, `format_score` if there is one, else 0.

    Raises:
        UserError: the ground truth is no number.
    """
    truth = wanted(ground_truth, "gsm8k")
    if config.conventions == "verl":
        return _as_verl(solution_str, truth, config)
    target = number(truth.rpartition("####")[2])
    if target is None:
        raise UserError(f"gsm8k: the ground truth {truth[:80]!r} is not a number")
    response = said(solution_str)
    found = [number(place) for place in HASHES.split(response)[1:]]
    answers = [answer for answer in found if answer is not None]
    if not answers and config.method == "flexible":
        box = _answers.boxed(response)
        last = PLAIN.findall(EXPONENT.sub("^", _tidy(response)))
        answers = [a for a in (number(box or ""), number(last[-1] if last else "")) if a][:1]
    if not answers:
        return 0.0
    (value, is_share), (sought, sought_share) = answers[-1], target
    if is_share != sought_share:  # 42% is 42 and 0.42, and 0.42% neither
        right = _hundredth(answers[-1]) == _hundredth(target) or (
            value == sought and abs(value) >= 1
        )
    else:
        right = value == sought
    return config.score if right else config.format_score


def _hundredth(found: tuple[Fraction, bool]) -> Fraction:
    return found[0] / 100 if found[1] else found[0]


def _tidy(text: str) -> str:
    """The text with plain digits, minus signs and commas."""
    text = RAISED.sub(r"^\g<0>", text.replace("\u2212", "-").replace("\u2013", "-"))
    text = LOWERED.sub(r"_\g<0>", text)
    text = VULGAR.sub(r" \g<0>", text)  # 5½ is no 51/2
    text = unicodedata.normalize("NFKC", text).replace("\u2044", "/")
    text = text.replace("{,}", ",").replace("\\!", "").replace("\\,", "").replace("\\$", "$")
    return SPACED.sub(lambda match: match[0].replace(" ", ""), text).replace("\\%", "%")


def number(text: str) -> tuple[Fraction, bool] | None:
    """The number that a text begins with, and whether a percent sign follows it; None for several or none."""
    line = LEAD.sub("", _tidy(text[:MOST_CHARACTERS])).partition("\n")[0]
    _, equals, right = line.rpartition("=")
    line = LEAD.sub("", right) if equals and re.match(r"\s*[-+$]?\d", right) else line
    match = VALUE.match(line)
    if match is None or HEDGED.match(line, match.end()):
        return None
    sign, whole, over, under, digits, power = match.groups()
    if sign.count("-") + sign.count("+") > 1 or GLUED.match(line, match.end()):
        return None
    try:
        if under:
            value = Fraction(int(whole or 0)) + Fraction(int(over), int(under))
        else:
            value = Fraction(digits.replace(",", "") + (power or ""))
    except (ValueError, ZeroDivisionError):
        return None
    scaled = SCALE.match(line, match.end())
    value *= SCALES[scaled[1].casefold()] if scaled else 1
    return (-value if "-" in sign else value), bool(PERCENT.match(line, match.end()))


def _as_verl(solution_str: str, truth: str, config: Config) -> float:
    tail = solution_str[-TAIL:]
    pattern = MARKED if config.method == "strict" else NUMBER
    found = [number.replace(",", "") for number in pattern.findall(tail)]
    if config.method == "flexible":
        found = [number for number in found if number.strip(".")]
    if not found:
        return 0.0
    return config.score if found[-1] == truth else config.format_score
