"""Llama 3: the whole turn is `{"name": "add", "parameters": {"a": 1}}`, several separated by `;`.

A leading `<|python_tag|>` and the special tokens around it are passed over.
"""

from __future__ import annotations

import json
import re

from meshrl.rollout.tools.parsing import called
from meshrl.rollout.tools.ports import ToolCall

_SPECIAL = re.compile(r"<\|\w+\|>")


def parse(text: str) -> list[ToolCall]:
    """See `ToolFormat`. A turn that does not begin with an object that names a tool is an answer."""
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
        calls.append(called(found, arguments="parameters"))
        rest = rest[end:].lstrip("; \n")
    return calls
