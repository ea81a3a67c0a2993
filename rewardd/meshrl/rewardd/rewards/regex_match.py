"""The response matches a regular expression that comes with the sample, or with the recipe.

`exact_match` compares what a pattern finds with the ground truth; here the ground truth is the pattern itself.
"""

from __future__ import annotations

import re
from functools import lru_cache

from meshrl.common import config
from meshrl.contract.errors import UserError
from meshrl.contract.types import Json
from meshrl.rewardd.rewards._answers import wanted


class Config(config.Config):
    """Which pattern, and how much of the response it must match."""

    pattern: config.RegularExpression | None = None
    """Null: the sample's ground truth is the pattern."""
    whole: bool = False
    """True: the pattern matches the whole response; else anywhere in it."""
    ignore_case: bool = False
    multiline: bool = False
    """`^` and `$` match at every line."""
    score: float = 1.0
    """Score of a match."""
    penalty: float = 0.0
    """Score without a match."""


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Json,
    extra_info: Json = None,
    config: Config = Config(),  # noqa: B008 - frozen
) -> float:
    """`score` if the pattern matches, else `penalty`.

    Raises:
        UserError: the ground truth is no regular expression, or empty: that matches everything.
    """
    text = config.pattern if config.pattern is not None else wanted(ground_truth, "regex_match")
    flags = re.DOTALL | (re.IGNORECASE if config.ignore_case else 0)
    pattern = _compiled(text, flags | (re.MULTILINE if config.multiline else 0))
    match = pattern.fullmatch if config.whole else pattern.search
    return config.score if match(solution_str) else config.penalty


@lru_cache(maxsize=1024)
def _compiled(text: str, flags: int) -> re.Pattern[str]:
    try:
        return re.compile(text, flags)
    except re.error as error:
        raise UserError(
            f"regex_match: the ground truth {text[:80]!r} is not a regular expression: {error}"
        ) from error
