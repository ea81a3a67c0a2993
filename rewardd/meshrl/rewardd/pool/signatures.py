"""The kinds of reward functions, and an adapter from each to the signature of verl's `compute_score`."""

from __future__ import annotations

import functools
import inspect
import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Any

from meshrl.contract.errors import MeshError

MAX_STEPS = 4096
PARAGRAPH = re.compile(r"\S(?:.*?)(?=\n\s*\n|\s*\Z)", re.DOTALL)
"""A step, unless the function says where steps end: text up to an empty line."""


class FunctionKind(StrEnum):
    """How a function is called, always with keywords."""

    COMPUTE_SCORE = "compute_score"
    """verl's: `(data_source, solution_str, ground_truth, extra_info=None) -> float | dict`."""
    BATCH = "batch"
    """verl's batched: `(data_sources, solution_strs, ground_truths, extra_infos) -> list`, one entry per sample."""
    PROCESS = "process"
    """As `compute_score`, but returns a list of step scores, or of pairs (characters of the response up to the step's
    end, score); the reward is their sum; if the run rewards tokens, each step's last token gets its score."""


ARGUMENTS: Mapping[FunctionKind, tuple[str, ...]] = {
    FunctionKind.COMPUTE_SCORE: ("data_source", "solution_str", "ground_truth", "extra_info"),
    FunctionKind.BATCH: ("data_sources", "solution_strs", "ground_truths", "extra_infos"),
    FunctionKind.PROCESS: ("data_source", "solution_str", "ground_truth", "extra_info"),
}
"""Keywords that each kind is called with."""


def takes_columns(parameters: Iterable[str]) -> bool:
    """Whether these are the parameters of a function for verl's batch manager."""
    return {*parameters}.issuperset(ARGUMENTS[FunctionKind.BATCH])


class BadShapeError(MeshError):
    """A function returned something else than its kind requires."""


def as_compute_score(kind: FunctionKind, function: Callable[..., Any]) -> Callable[..., Any]:
    """A callable with verl's signature; `async def` stays `async def`."""
    if kind is FunctionKind.BATCH:
        return _wrapped(function, _as_lists, lambda name, result, _: _only(name, result))
    if kind is FunctionKind.PROCESS:
        return _wrapped(function, dict, _of_steps)
    return function


def _wrapped(
    function: Callable[..., Any],
    before: Callable[[dict[str, Any]], dict[str, Any]],
    after: Callable[[str, Any, dict[str, Any]], Any],
) -> Callable[..., Any]:
    name = getattr(function, "__name__", "the function")
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def waiting(**arguments: Any) -> Any:
            return after(name, await function(**before(arguments)), arguments)

        return waiting

    @functools.wraps(function)
    def calling(**arguments: Any) -> Any:
        return after(name, function(**before(arguments)), arguments)

    return calling


def _as_lists(arguments: dict[str, Any]) -> dict[str, Any]:
    """One sample as a batch of one; other keywords stay as they are."""
    plural = dict(
        zip(ARGUMENTS[FunctionKind.COMPUTE_SCORE], ARGUMENTS[FunctionKind.BATCH], strict=True)
    )
    return {plural.get(key, key): [v] if key in plural else v for key, v in arguments.items()}


def _only(name: str, result: Any) -> Any:
    if not isinstance(result, Sequence) and not hasattr(result, "__getitem__"):
        raise BadShapeError(
            f"{name} returned {type(result).__name__}; want a list, one score per sample"
        )
    if isinstance(result, str | Mapping) or len(result) != 1:
        raise BadShapeError(
            f"{name} returned {_shape(result)} for 1 sample; want a list of 1 score"
        )
    return result[0]


def _of_steps(name: str, result: Any, arguments: dict[str, Any]) -> Any:
    """`{score, steps, step_min, step_mean}` of a list of step scores, and `token_rewards` if token ends are known."""
    if hasattr(result, "tolist"):
        result = result.tolist()
    if not isinstance(result, list | tuple):
        raise BadShapeError(f"{name} returned {_shape(result)}; want a list of step scores")
    if len(result) > MAX_STEPS:
        raise BadShapeError(f"{name} returned {len(result)} steps; at most {MAX_STEPS}")
    for number, step in enumerate(result):
        if not isinstance(step, int | float) and not _is_pair(step):
            raise BadShapeError(
                f"{name}: step {number} is {_shape(step)}, not a number or a pair (end, number)"
            )
    scores = [float(step[1] if _is_pair(step) else step) for step in result]
    summary: dict[str, Any] = {
        "score": sum(scores),
        "steps": len(scores),
        "step_min": min(scores, default=0.0),
        "step_mean": sum(scores) / max(1, len(scores)),
    }
    token_ends = (arguments["extra_info"] or {}).get("token_ends")
    if token_ends is not None:
        ends = _ends(name, result, arguments["solution_str"])
        summary["token_rewards"] = _at_tokens(ends, scores, token_ends)
    return summary


def _is_pair(step: Any) -> bool:
    return (
        isinstance(step, list | tuple)
        and len(step) == 2
        and isinstance(step[0], int)
        and isinstance(step[1], int | float)
    )


def _ends(name: str, steps: Sequence[Any], solution: str) -> list[int]:
    """Characters up to the end of each step: those of the pairs, else the paragraphs of the response if as many."""
    if all(map(_is_pair, steps)):
        return [step[0] for step in steps]
    ends = [match.end() for match in PARAGRAPH.finditer(solution)]
    if any(map(_is_pair, steps)) or len(ends) != len(steps):
        raise BadShapeError(
            f"{name} returned {len(steps)} steps for a response of {len(ends)} paragraphs; to reward its tokens"
            " want one score for each, or pairs (characters up to the step's end, score)"
        )
    return ends


def _at_tokens(
    ends: Sequence[int], scores: Sequence[float], token_ends: Sequence[int]
) -> list[float]:
    """Rewards per token: each score at the token that ends its step; several steps may end in one token."""
    rewards = [0.0] * len(token_ends)
    for end, score in zip(ends, scores, strict=True):
        if rewards:
            rewards[min(bisect_left(token_ends, end), len(rewards) - 1)] += score
    return rewards


def _shape(value: Any) -> str:
    size = f" of {len(value)}" if hasattr(value, "__len__") else ""
    return f"{type(value).__name__}{size}"
