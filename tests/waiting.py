"""Waiting for what lies on the other side of a socket or in another process."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

from meshrl.contract.ports import Queue
from meshrl.contract.types import Ledger

Found = TypeVar("Found")
PAUSE_S = 0.01


async def until(condition: Callable[[], Found]) -> Found:
    """Wait until it is true, and return it; the suite's own timeout is the deadline."""
    while not (found := condition()):  # noqa: ASYNC110 - no event on this side
        await asyncio.sleep(PAUSE_S)
    return found


async def answered(ask: Callable[[], Awaitable[Found]]) -> Found:
    """The same of a call: ask again until the answer is true."""
    while not (found := await ask()):  # noqa: ASYNC110 - no event on this side
        await asyncio.sleep(PAUSE_S)
    return found


async def resident(queue: Queue, run: str, state: str, count: int) -> Ledger:
    """Wait for so many resident rows in this state."""
    while (ledger := await queue.ledger(run)).resident.get(state, 0) != count:
        assert ledger.balanced
        await asyncio.sleep(PAUSE_S)
    return ledger


def runs(pid: int) -> bool:
    """Whether the process exists and has not ended: a zombie has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


async def gone(*pids: int) -> None:
    """Wait for the end of processes, whosever children they are."""
    await until(lambda: not any(map(runs, pids)))
