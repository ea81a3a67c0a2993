"""Tool calls: are they well formed, and are they the right ones? As in ToolRL (https://arxiv.org/abs/2504.13958).

The response holds `<think>…</think>` and then `<tool_call>` with one JSON object per line, `{"name": …,
"parameters": {…}}`, and/or `<response>…</response>`; the ground truth is a response of that form. Two components:
`format_score`, 1 for the blocks that the ground truth has, each once and in order; `accuracy_score`, how well the
calls agree: common tool names, common parameter names and equal parameter values over a pairing of the calls, as a
share of the most, scaled from -3 to 3. The score is their sum.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator

from pydantic import PositiveFloat

from meshrl.common import config
from meshrl.contract.errors import UserError
from meshrl.contract.types import Json
from meshrl.rewardd.rewards._answers import blocks, same
from meshrl.rewardd.rewards._answers import wanted as wanted_text

BLOCKS = ("think", "tool_call", "response")
MAX_CALLS = 64
"""Most calls in a response: pairing them takes quadratic time."""


class Config(config.Config):
    """Maximum of each part."""

    format_max: float = 1.0
    """Score of the right form; any other form scores 0."""
    accuracy_max: PositiveFloat = 3.0
    """Score of the right calls; entirely wrong ones score minus this."""


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Json,
    extra_info: Json = None,
    config: Config = Config(),  # noqa: B008 - frozen
) -> dict[str, float]:
    """The sum of both parts, and each.

    Raises:
        UserError: the ground truth is no text, or its calls cannot be read.
    """
    if not isinstance(ground_truth, str):
        raise UserError(
            f"tool_use needs the wanted response as ground truth, got {type(ground_truth).__name__}"
        )
    ground_truth = wanted_text(ground_truth, "tool_use")
    formed = _form(solution_str) == _form(ground_truth) != ()
    form = config.format_max if formed else 0.0
    wanted = _calls(ground_truth)
    if wanted is None:
        raise UserError(f"tool_use cannot read the calls of the ground truth {ground_truth[:80]!r}")
    if not any(True for _ in _bodies(ground_truth)):  # nothing to call: the form is all there is
        return {"score": form, "format_score": form, "accuracy_score": 0.0}
    given = _calls(solution_str)
    share = 0.0 if given is None else agreement(given, wanted)
    accuracy = config.accuracy_max * (2 * share - 1)
    return {"score": form + accuracy, "format_score": form, "accuracy_score": accuracy}


def _form(text: str) -> tuple[str, ...]:
    """The blocks of a text in order, with only white space around them; else ()."""
    rest, found = text.strip(), []
    for tag in BLOCKS:
        opening, closing = f"<{tag}>", f"</{tag}>"
        if opening not in text and closing not in text:
            continue
        if text.count(opening) != 1 or text.count(closing) != 1 or not rest.startswith(opening):
            return ()
        rest = rest.partition(closing)[2].strip()
        found.append(tag)
    return () if rest else tuple(found)


def _bodies(text: str) -> Iterator[str]:
    return blocks(text, "<tool_call>", "</tool_call>")


def _calls(text: str) -> list[tuple[str, dict[str, Json]]] | None:
    """Names and parameters; None if a line is not a call."""
    calls = []
    for line in "\n".join(_bodies(text)).splitlines():
        if not line.strip():
            continue
        try:
            call = json.loads(line, object_pairs_hook=_distinct, parse_constant=_refused)
            name, parameters = call["name"], call.get("parameters", call.get("arguments", {}))
            if "parameters" in call and "arguments" in call:
                return None  # as two values under one name
            if not isinstance(name, str) or not isinstance(parameters, dict):
                return None
            calls.append((name, parameters))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return None
        if len(calls) > MAX_CALLS:
            return None
    return calls


def _distinct(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    """An object; ValueError for two values under one name, of which one could be a guess."""
    if len(found := dict(pairs)) != len(pairs):
        raise ValueError("two values under one name")
    return found


def _refused(constant: str) -> Json:
    raise ValueError(f"{constant} is not JSON")


def agreement(
    given: list[tuple[str, dict[str, Json]]], wanted: list[tuple[str, dict[str, Json]]]
) -> float:
    """From 0 to 1: agreement of names, then of each wanted call with its most similar unused call of the response."""
    if not given or not wanted:
        return float(not given and not wanted)
    earned = _common([name for name, _ in given], [name for name, _ in wanted])
    possible = 1.0
    left = list(given)
    for name, parameters in wanted:
        possible += 1 + len(parameters)
        alike = [_alike(other, parameters) if n == name else -1.0 for n, other in left]
        if alike and (best := max(alike)) >= 0:
            earned += best
            del left[alike.index(best)]
    return earned / possible


def _alike(given: dict[str, Json], wanted: dict[str, Json]) -> float:
    """Common parameter names as a share, plus one for every equal value."""
    equal = sum(key in given and same(given[key], value) for key, value in wanted.items())
    return _common(given, wanted) + float(equal)


def _common(some: Iterable[str], others: Iterable[str]) -> float:
    """|A ∩ B| / |A ∪ B| of multisets; 1 for two empty ones."""
    a, b = Counter(list(some)), Counter(list(others))
    union = (a | b).total()
    return float((a & b).total() / union) if union else 1.0
