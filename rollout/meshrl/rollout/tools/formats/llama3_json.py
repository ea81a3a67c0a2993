"""Llama 3: the whole turn is `{"name": "add", "parameters": {"a": 1}}`, several separated by `;`.

A leading `<|python_tag|>` and the special tokens around it are ignored.
"""

from __future__ import annotations

import json
import re

from meshrl.rollout.tools.parsing import call_of
from meshrl.rollout.tools.ports import ToolCall

_SPECIAL = re.compile(r"<\|\w+\|>")


def parse(text: str) -> list[ToolCall]:
    """See `ToolFormat`. A turn that does not begin with an object with a `name` is an answer."""
    rest = _SPECIAL.sub("", text).strip()
    calls: list[ToolCall] = []
    decoder = json.JSONDecoder()
    while rest.startswith("{"):
        try:
            found, end = decoder.raw_decode(rest)
        except ValueError as error:
            problem = f"the call is not JSON: {error}"
            return [*calls, ToolCall(name="", problem=problem)] if '"name"' in rest else calls
        if "name" not in found:
            break
        calls.append(call_of(found, arguments="parameters"))
        rest = rest[end:].lstrip("; \n")
    return calls
