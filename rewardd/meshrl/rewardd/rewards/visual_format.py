"""The response says what it sees before it answers: the forms in which VAGEN has agents reason over pictures.

    free_think              <think>…</think><answer>…</answer>
    grounding               <think><observation>…</observation><reasoning>…</reasoning></think><answer>…</answer>
    worldmodeling           <think><reasoning>…</reasoning><prediction>…</prediction></think><answer>…</answer>
    grounding_worldmodeling all three in the thought, in this order

The forms' names: https://arxiv.org/abs/2510.16907. For answers of one turn.
"""

from __future__ import annotations

import re
from typing import Literal

from meshrl.common import config
from meshrl.contract.types import Json
from meshrl.rewardd.rewards.format import tagged

THOUGHTS = {
    "free_think": (),
    "grounding": ("observation", "reasoning"),
    "worldmodeling": ("reasoning", "prediction"),
    "grounding_worldmodeling": ("observation", "reasoning", "prediction"),
}
"""Blocks that a thought must have, with more than white space in them, by form."""


class Config(config.Config):
    """The wanted form."""

    form: Literal["free_think", "grounding", "worldmodeling", "grounding_worldmodeling"] = (
        "grounding"
    )
    """Which blocks a thought has."""
    score: float = 1.0
    """Score of the wanted form."""
    penalty: float = 0.0
    """Score of any other form, usually 0 or negative."""


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Json,
    extra_info: Json = None,
    config: Config = Config(),  # noqa: B008 - frozen
) -> float:
    """`score` for the wanted form, else `penalty`."""
    return config.score if is_formed(solution_str, config.form) else config.penalty


def is_formed(text: str, form: str) -> bool:
    """Whether `text` is a thought of this form and an answer, and none of their blocks is empty."""
    if not tagged(text, ("think", "answer")):
        return False
    thought, answer = (_inside(text, tag) for tag in ("think", "answer"))
    inner = THOUGHTS[form]
    if not answer or not thought or (inner and not tagged(thought, inner)):
        return False
    return all(_inside(thought, tag) for tag in inner)


def _inside(text: str, tag: str) -> str:
    """The text in the block, without white space around it."""
    found = re.search(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
    return found[1].strip() if found else ""
