"""A fenced block of Python: its code is the argument `code` of the tool `python`.

```python
print(6 * 7)
```
"""

from __future__ import annotations

import re

from meshrl.rollout.tools.ports import ToolCall

_FENCE = re.compile(r"```(?:python|py)[ \t]*\n(.*?)```", re.DOTALL)


def parse(text: str) -> list[ToolCall]:
    """See `ToolFormat`; a block without its end is no call."""
    return [ToolCall(name="python", arguments={"code": code}) for code in _FENCE.findall(text)]
