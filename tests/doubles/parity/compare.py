"""Runs a case through its adapter and compares what comes out with what was recorded."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from meshrl.contract.errors import MeshError
from tests.doubles.parity import advantages, correction, losses, recipes, statistics
from tests.doubles.parity.cases import Array, Case
from tests.doubles.parity.layout import Found

ADAPTERS: Mapping[str, Callable[[Case], Found]] = {
    **advantages.ADAPTERS,
    **correction.ADAPTERS,
    **losses.ADAPTERS,
    **recipes.ADAPTERS,
    **statistics.ADAPTERS,
}
"""The adapter of each recorded function."""


class Verdict(enum.Enum):
    """How a case ended."""

    PASSED = "passed"
    FAILED = "failed"
    UNSUPPORTED = "unsupported"


@dataclass(frozen=True, kw_only=True, slots=True)
class Judged:
    """A case and its verdict."""

    name: str
    family: str
    function: str
    verdict: Verdict
    why: str = ""


def judge(case: Case) -> Judged:
    """Run and compare one case."""
    adapter = ADAPTERS.get(case.function)
    if adapter is None:
        return _judged(case, Verdict.UNSUPPORTED, f"{case.function} is not offered")
    if case.seed is not None:
        torch.manual_seed(case.seed)
    try:
        found = adapter(case)
    except (MeshError, ValueError, ArithmeticError, TypeError, KeyError, IndexError) as error:
        if case.raises and _raised(error, case.raises):
            return _judged(case, Verdict.PASSED)
        return _judged(case, Verdict.FAILED, f"raised {type(error).__name__}: {error}")
    if case.raises:
        return _judged(case, Verdict.FAILED, f"did not raise {case.raises}")
    differences = list(_differences(case, found))
    verdict = Verdict.FAILED if differences else Verdict.PASSED
    return _judged(case, verdict, "; ".join(differences))


def _judged(case: Case, verdict: Verdict, why: str = "") -> Judged:
    return Judged(
        name=case.name, family=case.family, function=case.function, verdict=verdict, why=why
    )


def _raised(error: Exception, expected: str) -> bool:
    """A refusal of ours stands for any refusal of theirs; arithmetic has to be the same error."""
    if expected == "ZeroDivisionError":
        return isinstance(error, ZeroDivisionError)
    return isinstance(error, MeshError | ValueError)


def _differences(case: Case, found: Found) -> Iterator[str]:
    mask = case.inputs.get(case.masked_by) if case.masked_by else None
    for name, expected in case.outputs.items():
        if name not in found.outputs:
            yield f"no output {name}"
            continue
        actual = _array(found.outputs[name])
        if actual.shape != expected.shape:
            yield f"{name} has shape {actual.shape}, wanted {expected.shape}"
            continue
        masked = mask is not None and mask.shape == expected.shape and not name.startswith("grad_")
        where = mask.astype(bool) if masked and mask is not None else np.ones(expected.shape, bool)
        yield from _off(name, actual[where], expected[where], case)
    for name, value in case.metrics.items():
        if name not in found.metrics:
            yield f"no metric {name}"
            continue
        yield from _off(name, np.array(found.metrics[name]), np.array(value), case)


def _off(name: str, actual: Array, expected: Array, case: Case) -> Iterator[str]:
    if expected.dtype.kind not in "fiub":
        if not np.array_equal(actual, expected):
            yield f"{name} differs"
        return
    actual, expected = actual.astype(np.float64), expected.astype(np.float64)
    if not np.allclose(actual, expected, rtol=case.rtol, atol=case.atol, equal_nan=True):
        worst = float(np.nanmax(np.abs(actual - expected)))
        yield f"{name} is off by {worst:.3g} (rtol {case.rtol:g}, atol {case.atol:g})"


def _array(value: Tensor | Array) -> Array:
    return value.detach().numpy() if isinstance(value, Tensor) else np.asarray(value)


def summary(judged: Iterable[Judged]) -> Iterator[str]:
    """A line per family, the cases that did not pass, the totals."""
    families: dict[str, Counter[Verdict]] = {}
    rest = []
    for one in judged:
        families.setdefault(one.family, Counter())[one.verdict] += 1
        if one.verdict is not Verdict.PASSED:
            rest.append(one)
    width = max(map(len, families), default=0)
    for family, counts in sorted(families.items()):
        parts = [f"{counts[v]:>4} {v.value}" for v in Verdict if counts[v]]
        yield f"{family:<{width}}{', '.join(parts)}"
    for one in rest:
        yield f"{one.verdict.value.upper()} {one.name}: {one.why}"
    totals = sum(families.values(), Counter())
    yield ", ".join(f"{totals[v]} {v.value}" for v in Verdict)
