"""The life of a client process: orders come as lines of JSON on stdin, answers go to stdout.

    {"ready": true}                         connected and warm
    > {"do": "pass", "name": ..., ...}      begin a pass
    {"done": true, "at": ...}               only from a role whose work ends by itself (the consumer)
    > {"do": "stop"}                        end the pass
    {...}                                   what the role has measured
    > {"do": "verify"}                      ask the consumer for what arrived
End of stdin ends the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Coroutine, Iterable
from contextlib import contextmanager
from itertools import islice
from typing import Any, Protocol


class Role(Protocol):
    """One of producer, annotator, consumer."""

    async def prepare(self, order: dict[str, Any]) -> None: ...

    async def work(self) -> None:
        """A pass; a role that is ended from outside works until it is cancelled."""
        ...

    def report(self) -> dict[str, Any]: ...

    def verify(self) -> dict[str, Any]: ...


class Timer:
    """Milliseconds of calls, in a list."""

    def __init__(self) -> None:
        self.ms: list[float] = []

    @contextmanager
    def __call__(self) -> Any:
        began = time.perf_counter()
        yield
        self.ms.append(1e3 * (time.perf_counter() - began))


async def in_order(calls: Iterable[Coroutine[Any, Any, Any]], at_a_time: int) -> AsyncIterator[Any]:
    """The answers of `calls`, so many of which are on their way at a time."""
    left = iter(calls)
    coming = deque(map(asyncio.create_task, islice(left, at_a_time)))
    while coming:
        answer = await coming.popleft()
        coming.extend(map(asyncio.create_task, islice(left, 1)))
        yield answer


def tell(**answer: Any) -> None:
    """One line to the parent."""
    os.write(1, (json.dumps(answer) + "\n").encode())


async def orders() -> AsyncIterator[dict[str, Any]]:
    """The parent's orders, until it hangs up."""
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        yield json.loads(line)


async def serve(role: Role) -> None:
    """Follow orders to the end of stdin."""
    work: asyncio.Task[None] | None = None

    async def run() -> None:
        try:
            await role.work()
        except Exception as error:  # the parent reports it; this child has failed in any case
            tell(error=f"{type(error).__name__}: {error}")
            raise
        tell(done=True, at=time.monotonic())

    tell(ready=True)
    async for order in orders():
        if order["do"] == "prepare":
            await role.prepare(order)
            tell(prepared=True)
        elif order["do"] == "pass":
            work = asyncio.create_task(run())
        elif order["do"] == "stop":
            assert work is not None
            work.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await work
            tell(**role.report())
        elif order["do"] == "verify":
            tell(**role.verify())
