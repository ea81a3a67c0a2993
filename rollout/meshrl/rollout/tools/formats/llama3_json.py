"""Llama 3: the whole turn is `{"name": "add", "parameters": {"a": 1}}`, several separated by `;`.

A leading `<|python_tag|>` and the special tokens around it are ignored.
"""

from __future__ import annotations

import json

from meshrl.rollout.tools.formats import call_of, is_wrapped, skip
from meshrl.rollout.tools.ports import ToolCall


def parse(text: str) -> list[ToolCall]:
    """The calls in a turn. One that does not begin with an object with a `name` is an answer."""
    rest = _without_special(text).strip()
    calls: list[ToolCall] = []
    decoder = json.JSONDecoder()
    at = 0
    while rest.startswith("{", at):
        try:
            found, end = decoder.raw_decode(rest, at)
        except (ValueError, RecursionError) as error:
            deep = isinstance(error, RecursionError)
            problem = "the call is nested too deeply" if deep else f"the call is not JSON: {error}"
            named = rest.find('"name"', at) >= 0
            return [*calls, ToolCall(name="", problem=problem)] if named else calls
        if "name" not in found and not is_wrapped(found):
            break
        calls.append(call_of(found, arguments="parameters"))
        at = skip(rest, end, "; \n")
    return calls


def _without_special(text: str) -> str:
    """`text` without special tokens such as `<|eom_id|>`."""
    kept: list[str] = []
    done = 0
    at = text.find("<|")
    while at >= 0:
        end = at + 2
        while end < len(text) and (text[end].isalnum() or text[end] == "_"):
            end += 1
        if end > at + 2 and text.startswith("|>", end):
            kept.append(text[done:at])
            done = end = end + 2
        at = text.find("<|", end)
    return "".join([*kept, text[done:]]) if kept else text
