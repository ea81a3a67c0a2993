"""The ground truth of a sample, and the part of a response that counts as its answer."""

from __future__ import annotations

import math
import re
from typing import Literal

from meshrl.contract.errors import UserError
from meshrl.contract.types import Json

Conventions = Literal["meshrl", "verl"]
"""`meshrl`: strict, and right as far as we know; `verl`: verl's numbers, its mistakes included."""
NOTHING = {"", "nan", "null"}
"""Texts that stand for an empty cell."""
MOST_FLOAT = 1e300
NOISE = 1e-12
"""Beside a wanted 0.0, where there is a tolerance."""
THOUGHT = re.compile(r"^[ \t]*<think>|</think>", re.MULTILINE)


def wanted(ground_truth: Json, scorer: str) -> str:
    """The ground truth as text.

    Raises:
        UserError: it is no answer: null, NaN or empty.
    """
    missing = ground_truth is None or (isinstance(ground_truth, float) and math.isnan(ground_truth))
    if missing or (text := str(ground_truth)).strip().casefold() in NOTHING:
        shown = str(ground_truth)[:80]
        raise UserError(f"{scorer}: the ground truth {shown!r} is no answer; mend or drop the row")
    return text


def same(given: Json, wanted: Json, tolerance: float = 0.0) -> bool:
    """Equal as JSON: true is not 1, and a number may differ by `tolerance` times a wanted float."""
    if isinstance(wanted, bool) or isinstance(given, bool):
        return given is wanted
    if isinstance(wanted, int | float) and isinstance(given, int | float):
        if given == wanted or (given != given and wanted != wanted):
            return True
        if isinstance(wanted, int) or not math.isfinite(wanted) or abs(given) > MOST_FLOAT:
            return False
        return abs(given - wanted) <= max(tolerance * abs(wanted), NOISE * (tolerance > 0))
    if isinstance(wanted, list) and isinstance(given, list):
        alike = zip(given, wanted, strict=False)
        return len(given) == len(wanted) and all(same(a, b, tolerance) for a, b in alike)
    if isinstance(wanted, dict) and isinstance(given, dict):
        return given.keys() == wanted.keys() and all(
            same(given[key], value, tolerance) for key, value in wanted.items()
        )
    return bool(type(given) is type(wanted) and given == wanted)


def said(response: str) -> str:
    """The response without its `<think>` blocks; one that does not end hides all that follows it."""
    kept, at, thinking = [], 0, False
    for mark in THOUGHT.finditer(response):
        if mark[0] != "</think>":
            if not thinking:
                kept.append(response[at : mark.start()])
            thinking = True
        else:
            if not thinking and not kept:
                kept.append("")  # the prompt has opened the thought
            elif not thinking:
                continue
            thinking = False
            at = mark.end()
    if not thinking:
        kept.append(response[at:])
    return "\n".join(kept)
