"""Search-R1 (https://arxiv.org/abs/2503.09516): `<search>a query</search>` asks, and `<information>` follows.

The query is the argument `query` of the tool `search`. A turn without one, or with an `<answer>` behind it, answers.
"""

from __future__ import annotations

from meshrl.rollout.tools.ports import ToolCall

OBSERVATION = "\n\n<information>{}</information>\n\n"
"""Text after a turn with a call, `{}` being its result: as it stands, no message of the chat template."""
STOP = ("</search>", "</answer>")
"""Strings that end a turn."""
OPENING, CLOSING, ANSWER = "<search>", "</search>", "<answer>"


def parse(text: str) -> list[ToolCall]:
    """The last query of a turn."""
    begin = text.rfind(OPENING)
    end = text.find(CLOSING, begin)
    if begin < 0 or end < 0 or text.find(ANSWER, end) >= 0:
        return []
    query = text[begin + len(OPENING) : end].strip()
    return [ToolCall(name="search", arguments={"query": query})]
