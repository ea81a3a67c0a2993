"""Answers to tasks of reasoning-gym, scored by each task's own rule: 1 for a right answer, for some parts of it.

The row comes from `data.reasoning_gym`: its `data_source` names the task, its `extra_info.metadata` is what the rule
needs, as a Python literal (JSON knows no tuples). https://github.com/open-thought/reasoning-gym
"""

from __future__ import annotations

import ast
import functools
from typing import Any

from meshrl.common import config
from meshrl.contract.errors import UserError
from meshrl.contract.types import Json, Outcome
from meshrl.sandbox import confinement

REQUIRES = ("reasoning_gym",)
EVALUATED = (
    "binary_matrix",
    "countdown",
    "intermediate_integration",
    "n_queens",
    "polynomial_multiplication",
    "puzzle24",
    "simple_integration",
    "spiral_matrix",
    "string_insertion",
)
"""Tasks of 0.1.25 whose rules evaluate the answer as Python, or let sympy do so: in a strict sandbox only."""


class Config(config.Config):
    """Place of the answer in the response."""

    answer_tag: str | None = "answer"
    """In the last `<answer>…</answer>`; without one the response scores 0. None: the whole response is the answer."""


def prepare() -> None:
    """Import the tasks before the first sample."""
    import reasoning_gym  # noqa: F401


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Json,
    extra_info: Json = None,
    config: Config = Config(),  # noqa: B008 - frozen
) -> dict[str, Json]:
    """The score of the task's rule. A rule that fails at an answer scores 0: a bad answer has a score."""
    if data_source in EVALUATED and confinement.level != "strict":
        raise UserError(
            f"reasoning-gym evaluates answers to {data_source} as Python: set reward.recipe_sandbox: strict"
        )
    rule, entry = _rule(data_source), _entry(data_source, ground_truth, extra_info)
    answer = _answer(solution_str, config.answer_tag)
    if answer is None:
        return {"score": 0.0, "answered": 0.0}
    try:
        score = float(rule(answer, entry))
    except Exception:
        return {"score": 0.0, "answered": 1.0, "outcome": Outcome.POLICY_FAULT}
    return {"score": score, "answered": 1.0}


def _answer(response: str, tag: str | None) -> str | None:
    if tag is None:
        return response.strip()
    _, opened, rest = response.rpartition(f"<{tag}>")
    answer, closed, _ = rest.partition(f"</{tag}>")
    return answer.strip() if opened and closed else None


@functools.cache
def _rule(task: str) -> Any:
    from reasoning_gym import factory

    if task not in factory.DATASETS:
        raise UserError(
            f"data_source {task!r} is not a task of reasoning-gym; rows come from data.reasoning_gym"
        )
    return factory.get_score_answer_fn(task)


def _entry(task: str, answer: Json, extra_info: Json) -> dict[str, Any]:
    try:
        return {"answer": str(answer), "metadata": ast.literal_eval(extra_info["metadata"])}
    except (KeyError, TypeError, ValueError, SyntaxError) as error:
        raise UserError(
            f"a row of {task} has no extra_info.metadata of data.reasoning_gym: {error}"
        ) from error
