"""Hermes and Qwen: `<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>`, any number of times."""

from __future__ import annotations

import re

from meshrl.rollout.tools.parsing import call_of, from_json
from meshrl.rollout.tools.ports import ToolCall

_BLOCK = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)


def parse(text: str) -> list[ToolCall]:
    """See `ToolFormat`; the last block may lack its end, if a stop string removed it."""
    return [call_of(from_json(block.strip())) for block in _BLOCK.findall(text)]
