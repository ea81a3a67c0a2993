"""One daemon thread for blocking calls: a stuck one holds up neither the event loop nor the exit of the process."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from meshrl.contract.errors import UnavailableError

_T = TypeVar("_T")


class WorkerThread:
    """Runs calls one after the other in a thread of its own.

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
            UnavailableError: the lane is closed.
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
            except BaseException as error:  # handed to whoever awaits the future
                failure = error
            # The loop may be gone when a stuck call comes back at last: then nobody waits for it.
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


def _suppressed(call: Callable[[], object]) -> None:
    with contextlib.suppress(Exception):  # nobody is left to be told
        call()
