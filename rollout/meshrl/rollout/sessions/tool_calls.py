r"""Converts tool calls as the policy writes them (the format of Hermes and Qwen) to those of a client.

    <tool_call>
    {"name": "add", "arguments": {"a": 1, "b": 2}}
    </tool_call>

is `{"id": "call_…", "type": "function", "function": {"name": "add", "arguments": "{\"a\": 1, \"b\": 2}"}}`.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from typing import Any

from meshrl.rollout.sessions.requests import ToolCall
from meshrl.rollout.tools.formats.hermes import CLOSING, OPENING
from meshrl.rollout.tools.parsing import call_of, from_json


def parse_calls(text: str) -> tuple[str, tuple[ToolCall, ...]]:
    """The text before the first call, and the calls.

    If a call cannot be read, or other text follows, there are no calls and everything is text: a client must not run
    half of the calls.
    """
    first = at = text.find(OPENING)
    calls: list[ToolCall] = []
    while 0 <= at < len(text):
        end = text.find(CLOSING, at)
        if not text.startswith(OPENING, at) or end < 0:
            return text, ()
        call = _read(text[at + len(OPENING) : end].strip())
        if call is None:
            return text, ()
        calls.append(call)
        at = end + len(CLOSING)
        while at < len(text) and text[at].isspace():
            at += 1
    return (text[:first] if calls else text), tuple(calls)


def _read(text: str) -> ToolCall | None:
    found = call_of(from_json(text))
    if found.problem or not found.name:
        return None
    written = json.dumps(found.arguments, ensure_ascii=False)
    return ToolCall(id=f"call_{secrets.token_hex(12)}", name=found.name, arguments=written)


def read_arguments(text: str) -> Any:
    """Arguments as an object, as templates want them; text that is no JSON stays text."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def same_call(ours: ToolCall, theirs: Mapping[str, Any]) -> bool:
    """Whether a client's tool call is the one that it received; the JSON may be formatted differently."""
    function = theirs.get("function") or {}
    sent = function.get("arguments")
    arguments = read_arguments(sent) if isinstance(sent, str) else sent
    return (theirs.get("id"), function.get("name"), arguments) == (
        ours.id,
        ours.name,
        read_arguments(ours.arguments),
    )
