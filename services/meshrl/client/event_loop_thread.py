"""An event loop in its own thread, for callers without one. `meshrl.client.sync` runs on it."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine
from typing import Any, Final, TypeVar

from meshrl.contract.errors import UserError

T = TypeVar("T")

LEAVE_S: Final = 15.0
"""Seconds that a call gets to give back its rows after Ctrl-C has interrupted it."""


class EventLoopThread:
    """Runs coroutines for one or several calling threads. Starts at the first call and ends with `close`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run the coroutine; return its result or raise its error.

        An exception in the calling thread (Ctrl-C) cancels the coroutine and waits up to LEAVE_S for its end.

        Raises:
            UserError: this process is a fork of the one that connected.
        """
        try:
            loop = self._running()
        except UserError:
            coroutine.close()
            raise
        ended = threading.Event()

        async def run() -> T:
            try:
                return await coroutine
            finally:
                ended.set()

        future = asyncio.run_coroutine_threadsafe(run(), loop)
        try:
            return future.result()
        except BaseException:
            if not ended.is_set():
                future.cancel()
                ended.wait(LEAVE_S)
            raise

    def _running(self) -> asyncio.AbstractEventLoop:
        if os.getpid() != self._pid:
            raise UserError(
                f"this queue was connected in process {self._pid} and does not work in its fork {os.getpid()}:"
                " connect in the process that uses it"
            )
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(
                    target=_run, args=(self._loop,), name="meshrl-client", daemon=True
                )
                self._thread.start()
            return self._loop

    def close(self) -> None:
        """Cancel running calls and end the thread. Idempotent. The next call starts a new thread."""
        with self._lock:
            loop, thread = self._loop, self._thread
            self._loop = self._thread = None
        if loop is None or thread is None or os.getpid() != self._pid:
            return
        loop.call_soon_threadsafe(loop.stop)
        thread.join()


def _run(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        asyncio.set_event_loop(None)
        loop.close()
