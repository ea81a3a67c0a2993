"""The ways in which a reward function may be called, each made to look like verl's `compute_score`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import Any

from meshrl.contract.errors import MeshError

MAX_STEPS = 4096


class Kind(StrEnum):
    """How a function is called, always with keywords."""

    COMPUTE_SCORE = "compute_score"
    """verl's: `(data_source, solution_str, ground_truth, extra_info=None) -> float | dict`."""
    BATCH = "batch"
    """verl's batched: `(data_sources, solution_strs, ground_truths, extra_infos) -> list`, one entry per sample."""
    PROCESS = "process"
    """As `compute_score`, but returns a list of step scores; the reward is their sum."""


ARGUMENTS: Mapping[Kind, tuple[str, ...]] = {
    Kind.COMPUTE_SCORE: ("data_source", "solution_str", "ground_truth", "extra_info"),
    Kind.BATCH: ("data_sources", "solution_strs", "ground_truths", "extra_infos"),
    Kind.PROCESS: ("data_source", "solution_str", "ground_truth", "extra_info"),
}
"""What each kind is called with."""


class BadShapeError(MeshError):
    """A function returned something other than its kind promises."""


def as_compute_score(kind: Kind, function: Callable[..., Any]) -> Callable[..., Any]:
    """A callable with verl's signature; `async def` stays so."""
    if kind is Kind.BATCH:
        return _wrapped(function, _as_lists, _only)
    if kind is Kind.PROCESS:
        return _wrapped(function, dict, _sum_of_steps)
    return function


def _wrapped(
    function: Callable[..., Any],
    before: Callable[[dict[str, Any]], dict[str, Any]],
    after: Callable[[str, Any], Any],
) -> Callable[..., Any]:
    name = getattr(function, "__name__", "the function")
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def waiting(**arguments: Any) -> Any:
            return after(name, await function(**before(arguments)))

        return waiting

    @functools.wraps(function)
    def calling(**arguments: Any) -> Any:
        return after(name, function(**before(arguments)))

    return calling


def _as_lists(arguments: dict[str, Any]) -> dict[str, Any]:
    """One sample as a batch of one; further keywords go through."""
    plural = dict(zip(ARGUMENTS[Kind.COMPUTE_SCORE], ARGUMENTS[Kind.BATCH], strict=True))
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


def _sum_of_steps(name: str, result: Any) -> Any:
    """`{score, steps, step_min, step_mean}` of a list of step scores."""
    if hasattr(result, "tolist"):
        result = result.tolist()
    if not isinstance(result, list | tuple):
        raise BadShapeError(f"{name} returned {_shape(result)}; want a list of step scores")
    if len(result) > MAX_STEPS:
        raise BadShapeError(f"{name} returned {len(result)} steps; at most {MAX_STEPS}")
    wrong = next((n for n, step in enumerate(result) if not isinstance(step, int | float)), None)
    if wrong is not None:
        raise BadShapeError(f"{name}: step {wrong} is {_shape(result[wrong])}, not a number")
    steps = [float(step) for step in result] or [0.0]
    total = sum(steps)
    return {
        "score": total,
        "steps": len(result),
        "step_min": min(steps),
        "step_mean": total / len(steps),
    }


def _shape(value: Any) -> str:
    size = f" of {len(value)}" if hasattr(value, "__len__") else ""
    return f"{type(value).__name__}{size}"
