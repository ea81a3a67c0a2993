"""From what a model wrote to a call, or to what is wrong with it."""

from __future__ import annotations

import json

from meshrl.contract.types import Json
from meshrl.rollout.tools.ports import ToolCall


def from_json(text: str) -> Json:
    """The value, or a ToolCall with the problem."""
    try:
        return json.loads(text)
    except ValueError as error:
        return ToolCall(name="", problem=f"the call is not JSON: {error}")
    except RecursionError:
        return ToolCall(name="", problem="the call is nested too deeply")


def called(found: Json, *, arguments: str = "arguments") -> ToolCall:
    """The call in an object with `name` and `arguments` (or whatever the format calls them)."""
    if isinstance(found, ToolCall):
        return found
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        return ToolCall(name="", problem=f"a call is an object with `name` and `{arguments}`")
    given = found.get(arguments, {})
    if isinstance(given, str):  # some models write the object as text in the object
        given = from_json(given)
    if isinstance(given, ToolCall):
        return given
    if not isinstance(given, dict):
        return ToolCall(name=found["name"], problem=f"`{arguments}` must be an object")
    return ToolCall(name=found["name"], arguments=given)
