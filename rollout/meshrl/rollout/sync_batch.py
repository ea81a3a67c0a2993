"""Samples several rows together, so that their bits do not depend on when each of them arrived.

    program 0 ──generate──▶ BatchGenerator 0 ─┐
    program 1 ──generate──▶ BatchGenerator 1 ─┼─ every program has a request? ─▶ engine.generate_together, in order
    program 2 ─(has left)                     ┘

consumes: requests of programs. waits for: a request of every program that has not left. unblocked by: the last
request, or the last program that leaves. produces: streams that begin at the same decode step, on an otherwise idle
engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from meshrl.contract.types import GenerateDelta, GenerateRequest, Version
from meshrl.rollout.ports import TogetherEngine
from meshrl.rollout.streams import closing


class SyncBatch:
    """The programs of one batch. Each sends any number of requests; the next one waits until the last has begun."""

    def __init__(self, engine: TogetherEngine, size: int) -> None:
        self._engine = engine
        self._present = set(range(size))
        self._pending: dict[
            int, tuple[GenerateRequest, asyncio.Future[AsyncIterator[GenerateDelta]]]
        ] = {}

    def generator(self, index: int) -> BatchGenerator:
        """The `Generator` for program `index`."""
        return BatchGenerator(self, index)

    @property
    def version(self) -> Version:
        """The engine's."""
        return self._engine.version

    def leave(self, index: int) -> None:
        """Program `index` will send no more requests; idempotent."""
        self._present.discard(index)
        self._pending.pop(index, None)
        self._start_if_complete()

    async def begin(self, index: int, request: GenerateRequest) -> AsyncIterator[GenerateDelta]:
        """Wait until every program that is present has a request, then start all of them."""
        started: asyncio.Future[AsyncIterator[GenerateDelta]] = (
            asyncio.get_running_loop().create_future()
        )
        self._pending[index] = (request, started)
        self._start_if_complete()
        return await started

    def _start_if_complete(self) -> None:
        if not self._pending or self._pending.keys() != self._present:
            return
        pending, self._pending = sorted(self._pending.items()), {}
        streams = self._engine.generate_together([request for _, (request, _) in pending])
        for (_, (_, started)), stream in zip(pending, streams, strict=True):
            if not started.done():
                started.set_result(stream)


class BatchGenerator:
    """A `Generator` for one program of a sync batch."""

    def __init__(self, batch: SyncBatch, index: int) -> None:
        self._batch = batch
        self._index = index
        self._one_request = asyncio.Lock()

    @property
    def version(self) -> Version:
        """The version that samples the next token."""
        return self._batch.version

    async def generate(self, request: GenerateRequest) -> AsyncIterator[GenerateDelta]:
        """Sample one response, begun together with those of the batch's other programs."""
        async with self._one_request:
            begun = await self._batch.begin(self._index, request)
        async with closing(begun) as stream:
            async for delta in stream:
                yield delta
