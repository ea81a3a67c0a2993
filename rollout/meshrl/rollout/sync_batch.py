"""Rows that are sampled together, so that their bits do not depend on when each of them arrived.

    program 0 ──generate──▶ seat 0 ─┐
    program 1 ──generate──▶ seat 1 ─┼─ all seats taken? ─▶ engine.generate_together, in seat order
    program 2 ─(left)               ┘

consumes: requests of programs. waits for: every program that has not left to ask. unblocked by: the last request, or
the last leaver. produces: streams that began at the same decode step, on an engine where nothing else runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from meshrl.contract.types import GenerateDelta, GenerateRequest, Version
from meshrl.rollout.ports import TogetherEngine
from meshrl.rollout.sampling import closing


class SyncBatch:
    """One wave of programs. Each asks any number of times; its next request waits until the last one has begun."""

    def __init__(self, engine: TogetherEngine, size: int) -> None:
        self._engine = engine
        self._present = set(range(size))
        self._asked: dict[
            int, tuple[GenerateRequest, asyncio.Future[AsyncIterator[GenerateDelta]]]
        ] = {}

    def seat(self, index: int) -> Seat:
        """What program `index` takes for its engine."""
        return Seat(self, index)

    @property
    def version(self) -> Version:
        """The engine's."""
        return self._engine.version

    def leave(self, index: int) -> None:
        """Program `index` will ask no more; idempotent."""
        self._present.discard(index)
        self._asked.pop(index, None)
        self._start_if_complete()

    async def ask(self, index: int, request: GenerateRequest) -> AsyncIterator[GenerateDelta]:
        """Wait until everybody present has asked, then start together."""
        started: asyncio.Future[AsyncIterator[GenerateDelta]] = (
            asyncio.get_running_loop().create_future()
        )
        self._asked[index] = (request, started)
        self._start_if_complete()
        return await started

    def _start_if_complete(self) -> None:
        if not self._asked or self._asked.keys() != self._present:
            return
        asked, self._asked = sorted(self._asked.items()), {}
        streams = self._engine.generate_together([request for _, (request, _) in asked])
        for (_, (_, started)), stream in zip(asked, streams, strict=True):
            if not started.done():
                started.set_result(stream)


class Seat:
    """A `Generator` for one program of a wave."""

    def __init__(self, wave: SyncBatch, index: int) -> None:
        self._wave = wave
        self._index = index
        self._one_asks = asyncio.Lock()

    @property
    def version(self) -> Version:
        """The version that samples the next token."""
        return self._wave.version

    async def generate(self, request: GenerateRequest) -> AsyncIterator[GenerateDelta]:
        """Sample one response, begun together with those of the wave's other programs."""
        async with self._one_asks:
            begun = await self._wave.ask(self._index, request)
        async with closing(begun) as stream:
            async for delta in stream:
                yield delta
