"""Calls several shards at once: for all answers, for the first one, or for one after the other as they come."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine, Iterable, Mapping, Sequence
from typing import Any, Never, TypeVar

from meshrl.contract.errors import EndOfDataError

Answer = TypeVar("Answer")

NEWS = -1
"""Stands in the place of a shard number for the call that concerns them all."""


async def all_of(questions: Iterable[Awaitable[Answer]]) -> list[Answer]:
    """Every answer, in order. When some fail, all have been asked to the end; the first failure is raised."""
    answers = await asyncio.gather(*questions, return_exceptions=True)
    results: list[Answer] = []
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer
        results.append(answer)
    return results


async def any_of(questions: Iterable[Coroutine[Any, Any, Answer]]) -> Answer:
    """The first answer or failure; the other questions are cancelled, so they must be free of effects."""
    tasks = [asyncio.ensure_future(question) for question in questions]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return next(task for task in tasks if task in done).result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def by_key(pairs: Iterable[tuple[int, Answer]]) -> Mapping[int, Sequence[Answer]]:
    """Values by the shard they belong to, in the order given."""
    found: dict[int, list[Answer]] = {}
    for shard, value in pairs:
        found.setdefault(shard, []).append(value)
    return found


class Questions:
    """Which shards have something: one call to each, free of side effects, repeated only after it was answered."""

    def __init__(self, news: Coroutine[Any, Any, Never]) -> None:
        """`news` raises when waiting is of no more use."""
        self._asked: dict[asyncio.Future[None], int] = {}
        self._ready: list[int] = []
        self._ended: dict[int, EndOfDataError] = {}
        self._failures: list[BaseException] = []
        self._heard = asyncio.Event()
        self.ask(NEWS, news)

    async def close(self) -> None:
        """Ask no more."""
        asked = list(self._asked)
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)

    def unasked(self, shards: int) -> list[int]:
        """Those of the first `shards` shards that owe no answer and have not reached the end of the data."""
        known = {*self._asked.values(), *self._ended}
        return [number for number in range(shards) if number not in known]

    def ask(self, number: int, question: Coroutine[Any, Any, None]) -> None:
        """Ask a shard, which answers when it has something."""
        task = asyncio.ensure_future(question)
        self._asked[task] = number
        task.add_done_callback(self._answered)

    def _answered(self, task: asyncio.Future[None]) -> None:
        number = self._asked.pop(task)
        if task.cancelled():
            return
        error = task.exception()
        if error is None:
            self._ready.append(number)
        elif isinstance(error, EndOfDataError):
            self._ended[number] = error
        else:
            self._failures.append(error)
        self._heard.set()

    async def answered(self) -> Iterable[int]:
        """The shards that have something, once there is one; shards that answer while this is read come last.

        Raises what came instead: what `news` raised, a failure, or EndOfDataError once every shard has raised it.
        """
        ready = self._ready = list[int]()
        while not ready:
            for failure in self._failures:
                raise failure
            if set(self._asked.values()) <= {NEWS}:
                raise next(iter(self._ended.values()))
            self._heard.clear()
            await self._heard.wait()
        return ready
