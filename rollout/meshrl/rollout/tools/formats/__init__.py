"""Parses the text of a tool call into a `ToolCall`, or into one that says what is wrong.

What a policy samples may be hostile to its parser by chance. Every parser of it looks at each character a bounded
number of times: `str.find` and indices, no regular expressions, whose backtracking nobody sees.
"""

from __future__ import annotations

import json

from meshrl.common.plain_text import whole
from meshrl.contract.types import Json
from meshrl.rollout.tools.ports import ToolCall


def skip(text: str, at: int, characters: str) -> int:
    """The first place from `at` on whose character is none of `characters`."""
    while at < len(text) and text[at] in characters:
        at += 1
    return at


def from_json(text: str) -> Json:
    """The value, or a ToolCall that says what is wrong."""
    try:
        return json.loads(text)
    except ValueError as error:
        return ToolCall(name="", problem=f"the call is not JSON: {error}")
    except RecursionError:
        return ToolCall(name="", problem="the call is nested too deeply")


def call_of(value: Json, *, arguments: str = "arguments") -> ToolCall:
    """The call in an object with `name` and `arguments` (`arguments`: the key that the format uses).

    An object in OpenAI's form, `{"type": "function", "function": {…}}`, is the one in it. No arguments may be written
    as null or as an empty text. Numbers that JSON does not have make a call invalid.
    """
    if isinstance(value, ToolCall):
        return value
    if is_wrapped(value):
        value, arguments = value["function"], "arguments"
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return ToolCall(name="", problem=f"a call is an object with `name` and `{arguments}`")
    parsed = value.get(arguments)
    if (
        isinstance(parsed, str) and parsed.strip()
    ):  # some models write the object as text in the object
        parsed = from_json(parsed)
    if isinstance(parsed, ToolCall):
        return parsed
    if parsed is None or isinstance(parsed, str):
        parsed = {}
    name = whole(value["name"])
    if not isinstance(parsed, dict):
        return ToolCall(name=name, problem=f"`{arguments}` must be an object")
    try:
        written = json.dumps(parsed, ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):
        return ToolCall(name=name, problem=f"`{arguments}` has NaN or Infinity, which JSON has not")
    return ToolCall(name=name, arguments=json.loads(whole(written)))


def is_wrapped(value: Json) -> bool:
    """Whether a call is written in OpenAI's form."""
    return (
        isinstance(value, dict)
        and "name" not in value
        and isinstance(value.get("function"), dict)
        and "name" in value["function"]
    )
