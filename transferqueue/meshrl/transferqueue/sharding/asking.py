"""Asking several shards at once: everybody's answer, or the first one's."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine, Iterable, Mapping, Sequence
from typing import Any, TypeVar

Answer = TypeVar("Answer")


async def all_of(questions: Iterable[Awaitable[Answer]]) -> list[Answer]:
    """Every answer, in order. When some fail, all have been asked to the end; the first failure is raised."""
    answers = await asyncio.gather(*questions, return_exceptions=True)
    found: list[Answer] = []
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer
        found.append(answer)
    return found


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
