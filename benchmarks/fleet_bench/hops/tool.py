"""The one tool: what a key leads to, after 50 to 500 ms.

A key of three letters leads to another key, or with it the chain ends: to a number. Both, and how long a call takes,
are drawn from names: any process finds the same, and a row waits as long whatever the mode that it is sampled in.
"""

from __future__ import annotations

import asyncio
import random
import string

from meshrl.rollout.tools.ports import ToolCaller

GOES_ON = 0.6
"""Chains are geometric."""
TOOL_S = (0.05, 0.5)
"""A call takes so many seconds, least and most."""


def find(key: str) -> str:
    """The next key, or the number at the end of the chain."""
    draw = random.Random(f"hop/{key}")
    if draw.random() < GOES_ON:
        return "".join(draw.choices(string.ascii_lowercase, k=3))
    return f"{draw.randrange(1000):03}"


def seconds(row: str, key: str) -> float:
    """How long the call takes."""
    return random.Random(f"{row}/{key}").uniform(*TOOL_S)


async def look_up(key: str, caller: ToolCaller) -> str:
    """Find what a key leads to.

    Args:
        key: Three letters.
    """
    await asyncio.sleep(seconds(f"{caller.uid.task}/{caller.uid.index}", key))
    return find(key)
