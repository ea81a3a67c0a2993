"""The generator that a program is given where responses are kept: it goes on where the last holder stopped."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

import numpy as np

from meshrl.contract.nouns import GenerateDelta, GenerateRequest, LeasedRow, Version
from meshrl.rollout.journal import Journal
from meshrl.rollout.ports import Generator
from meshrl.rollout.sampling import closing


class Recorder:
    """A `Generator` for one row. What is kept is the first response, if it is to the task's prompt under the uid."""

    def __init__(self, engine: Generator, journal: Journal, row: LeasedRow) -> None:
        self._engine = engine
        self._journal = journal
        self._row = row
        self._asked = False

    @property
    def version(self) -> Version:
        """The version that samples the next token."""
        return self._engine.version

    async def generate(self, request: GenerateRequest) -> AsyncIterator[GenerateDelta]:
        """Sample one response; what was sampled before comes first, under the versions that did."""
        prefix = self._journal.prefix(self._row, self.version) if self._kept(request) else None
        if prefix is not None:
            self._journal.begin(self._row, sum(len(delta.tokens) for delta in prefix))
        for delta in prefix or ():
            yield delta
        async with closing(self._engine.generate(continuation(request, prefix or ()))) as stream:
            async for delta in stream:
                if prefix is not None:
                    self._keep(delta)
                yield delta

    def _kept(self, request: GenerateRequest) -> bool:
        """A program that asks for something else has its reasons: it gets what it asks for."""
        first, self._asked = not self._asked, True
        same = np.array_equal(request.prompt_ids, self._row.task.prompt_ids)
        return first and same and request.request_id == str(self._row.uid)

    def _keep(self, delta: GenerateDelta) -> None:
        if delta.finish_reason:
            self._journal.drop([self._row.uid])  # the row is written next, or fails
        else:
            self._journal.record(self._row.uid, delta)


def continuation(request: GenerateRequest, prefix: Sequence[GenerateDelta]) -> GenerateRequest:
    """The request for what comes after `prefix`."""
    tokens = [delta.tokens for delta in prefix]
    count = sum(map(len, tokens))
    if not count:
        return request
    left = max(0, request.sampling.max_tokens - count)
    return replace(
        request,
        prompt_ids=np.concatenate([request.prompt_ids, *tokens]).astype(np.int32),
        sampling=replace(request.sampling, max_tokens=left),
        continued=count,
    )
