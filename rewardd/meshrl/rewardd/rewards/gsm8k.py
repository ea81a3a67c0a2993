"""GSM8K: the number after the last `####`, compared as a string.

The format is the data set's own (Cobbe et al. 2021, https://arxiv.org/abs/2110.14168). `strict` is exact: "42.0" is
not "42" and "$12" is no number, which is what a policy under this reward learns to write.
"""

from __future__ import annotations

import re
from typing import Literal

from meshrl.contract import config
from meshrl.contract.types import Json

TAIL = 300
"""Only this many characters from the end are searched: an answer before them is not the final one."""
MARKED = re.compile(r"#### (-?[0-9.,]+)")
NUMBER = re.compile(r"-?[0-9.,]+")


class Config(config.Config):
    """What counts as the answer, and its score."""

    method: Literal["strict", "flexible"] = "strict"
    """`strict`: the last `#### number`; `flexible`: the last number."""
    format_score: float = 0.0
    """Score of a wrong answer in the right form."""
    score: float = 1.0
    """Score of the right answer."""


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Json,
    extra_info: Json = None,
    config: Config = Config(),  # noqa: B008 - frozen
) -> float:
    """`score` if the answer is the ground truth, `format_score` if there is one, else 0."""
    tail = solution_str[-TAIL:]
    pattern = MARKED if config.method == "strict" else NUMBER
    found = [number.replace(",", "") for number in pattern.findall(tail)]
    if config.method == "flexible":
        found = [number for number in found if number.strip(".")]
    if not found:
        return 0.0
    return config.score if found[-1] == str(ground_truth) else config.format_score
