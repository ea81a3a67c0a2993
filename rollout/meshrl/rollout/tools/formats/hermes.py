"""Hermes and Qwen: `<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>`, any number of times."""

from __future__ import annotations

from meshrl.rollout.tools.formats import call_of, from_json
from meshrl.rollout.tools.ports import ToolCall

OPENING, CLOSING = "<tool_call>", "</tool_call>"


def parse(text: str) -> list[ToolCall]:
    """The calls in a turn; the last block may lack its end, if a stop string removed it."""
    calls: list[ToolCall] = []
    at = text.find(OPENING)
    while at >= 0:
        begin = at + len(OPENING)
        end = text.find(CLOSING, begin)
        block = text[begin:end] if end >= 0 else text[begin:]
        calls.append(call_of(from_json(block.strip())))
        at = text.find(OPENING, end) if end >= 0 else -1
    return calls
