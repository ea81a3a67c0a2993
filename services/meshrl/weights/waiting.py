"""Waiting: deadlines that a stall of this very process does not use up, and a thread for calls that block."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from meshrl.contract.errors import UnavailableError, WaitTimeoutError

_T = TypeVar("_T")
_TICKS = 16


async def within(
    work: Awaitable[_T],
    seconds: float,
    what: str,
    on_late: Callable[[], None] | None = None,
) -> _T:
    """The result of `work`, or WaitTimeoutError after `seconds`; `on_late` is called once at half of them.

    Time is counted in ticks. A tick that lasted longer, because this process was stopped or its event loop blocked,
    still counts as one: a stall of this process is no failure of the other side.
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


async def unless(event: asyncio.Event, work: Awaitable[_T], why: str) -> _T:
    """The result of `work`; once `event` is set, UnavailableError with the reason `why`, and `work` is cancelled."""
    task, waiting = asyncio.ensure_future(work), asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise UnavailableError(why)
        return task.result()
    finally:
        await _end(task)
        await _end(waiting)


class WorkerThread:
    """Runs calls one after the other in one daemon thread: a stuck call blocks neither the event loop nor the exit.

    An executor would not do: the interpreter joins its threads at exit, and a thread inside a collective whose
    peer hangs returns only at the collective's own deadline.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False

    async def run(self, call: Callable[..., _T], *args: Any) -> _T:
        """The result of `call(*args)`. A cancelled wait leaves the call running to its own deadline.

        Raises:
            UnavailableError: the thread is closed.
        """
        if self._closed:
            raise UnavailableError(f"{self._name} is closed")
        loop = asyncio.get_running_loop()
        future: asyncio.Future[_T] = loop.create_future()

        def report(result: _T | None, error: BaseException | None) -> None:
            if future.done():
                return
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)  # type: ignore[arg-type]

        def work() -> None:
            result, failure = None, None
            try:
                result = call(*args)
            except BaseException as error:  # raised where the future is awaited
                failure = error
            # The loop may be closed when a stuck call returns at last: then nobody waits for it.
            if not loop.is_closed():
                loop.call_soon_threadsafe(report, result, failure)

        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            self._thread.start()
        self._calls.put(work)
        return await future

    def close(self, last: Callable[[], object] | None = None) -> None:
        """End the thread once the call it is in returns, and `last` after it; idempotent, never waits."""
        if not self._closed:
            self._closed = True
            if last is not None and self._thread is not None:
                self._calls.put(lambda: _suppressed(last))
            self._calls.put(None)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            call()


async def _end(task: asyncio.Future[Any]) -> None:
    if task.cancel():
        await asyncio.gather(task, return_exceptions=True)
    elif not task.cancelled():
        task.exception()  # retrieved: who waits for all of them raises another one


def _suppressed(call: Callable[[], object]) -> None:
    with contextlib.suppress(Exception):  # nobody waits for the result
        call()
