"""The answer is the ground truth, character for character, or one of several.

Characters of one look count as one, however they are composed (Unicode's form C).
"""

from __future__ import annotations

import re
import unicodedata

from meshrl.common import config
from meshrl.contract.errors import UserError
from meshrl.contract.types import Json
from meshrl.rewardd.rewards._answers import wanted


class Config(config.Config):
    """Place of the answer in the response, and the exactness of the match."""

    after: str | None = None
    """The answer is the text after the last occurrence of this; without one the score is 0."""
    pattern: config.RegularExpression | None = None
    """The answer is the last match of this regular expression (its first group, if it has one)."""
    ignore_case: bool = False
    strip: bool = True
    """Ignore white space around the answer and the ground truth."""


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Json,
    extra_info: Json = None,
    config: Config = Config(),  # noqa: B008 - frozen
) -> float:
    """1 if the answer equals the ground truth (or one entry, if that is a list), else 0.

    Raises:
        UserError: the ground truth is no answer.
    """
    truths = ground_truth if isinstance(ground_truth, list) else [ground_truth]
    if not truths:
        raise UserError("exact_match: the ground truth [] has no answer")
    targets = {_plain(wanted(truth, "exact_match"), config) for truth in truths}
    answer: str | None = solution_str
    if config.after is not None:
        _, mark, rest = solution_str.rpartition(config.after)
        answer = rest if mark else None
    if config.pattern is not None and answer is not None:
        found = [
            m.group(1) if m.re.groups else m.group() for m in re.finditer(config.pattern, answer)
        ]
        answer = found[-1] if found else None
    if answer is None:
        return 0.0
    return float(_plain(answer, config) in targets)


def _plain(text: str, config: Config) -> str:
    text = unicodedata.normalize("NFC", text.strip() if config.strip else text)
    return text.casefold() if config.ignore_case else text
