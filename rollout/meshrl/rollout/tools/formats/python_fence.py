"""A fenced block of Python: its code is the argument `code` of the tool `python`.

```python
print(6 * 7)
```
"""

from __future__ import annotations

from meshrl.rollout.tools.formats import skip
from meshrl.rollout.tools.ports import ToolCall

FENCE = "```"


def parse(text: str) -> list[ToolCall]:
    """The calls in a turn; a block without its end is no call."""
    calls: list[ToolCall] = []
    at = text.find(FENCE)
    while at >= 0:
        begin = _code_after(text, at + len(FENCE))
        if begin is None:
            at = text.find(FENCE, at + 1)
            continue
        end = text.find(FENCE, begin)
        if end < 0:
            break
        calls.append(ToolCall(name="python", arguments={"code": text[begin:end]}))
        at = text.find(FENCE, end + len(FENCE))
    return calls


def _code_after(text: str, at: int) -> int | None:
    """Index of the code in a fence whose backticks end at `at`; None: it is no fence of Python."""
    for name in ("python", "py"):
        if text.startswith(name, at):
            end = skip(text, at + len(name), " \t")
            return end + 1 if text.startswith("\n", end) else None
    return None
