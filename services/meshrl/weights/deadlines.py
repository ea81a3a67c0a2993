"""Waiting with a progress rule: deadlines that a stall of this very process does not use up."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from meshrl.contract.errors import WaitTimeoutError

_T = TypeVar("_T")
_TICKS = 16


async def within(
    work: Coroutine[Any, Any, _T],
    seconds: float,
    what: str,
    on_late: Callable[[], None] | None = None,
) -> _T:
    """The result of `work`, or WaitTimeoutError after `seconds`; `on_late` is called once at half of them.

    Time is counted in ticks, and a tick that lasted longer because this process was stopped, or its event loop
    held up, still counts as one: nobody else is blamed for our own stall.
    """
    task = asyncio.ensure_future(work)
    tick = seconds / _TICKS
    try:
        for passed in range(_TICKS):
            if passed == _TICKS // 2 and on_late is not None:
                on_late()
            done, _ = await asyncio.wait({task}, timeout=tick)
            if done:
                return task.result()
        raise WaitTimeoutError(f"{what}: no progress in {seconds:.1f} s")
    finally:
        await _end(task)


async def together(first: Coroutine[Any, Any, Any], second: Coroutine[Any, Any, Any]) -> None:
    """Run both to their end; the first failure cancels the other and is raised as it is."""
    tasks = {asyncio.ensure_future(first), asyncio.ensure_future(second)}
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            await _end(task)


async def first_ends(*work: Awaitable[Any]) -> None:
    """Run all until one ends, cancel the others, and raise what ended it if it failed."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        ended = [task for task in tasks if task.done()]
        for task in tasks:
            await _end(task)
    for task in ended:
        task.result()


async def _end(task: asyncio.Future[Any]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
