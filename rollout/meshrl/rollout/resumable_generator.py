"""The generator that a program is given where rows are kept: it goes on where the last holder stopped.

    the row      prompt │ sampled │ observed │ sampled ……
    kept of it            ●●●●●●●   ○○○○○○○○   ●●●●●●●     ● under the version that sampled it, ○ under UNSERVED

A row that comes with a past is lived through again: turns are answered from what was kept, as far as it reaches.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import replace

import numpy as np

from meshrl.contract.types import (
    GenerateDelta,
    GenerateRequest,
    Int32,
    LeasedRow,
    Version,
)
from meshrl.rollout.generation_checkpoint import Journal
from meshrl.rollout.ports import Generator
from meshrl.rollout.sampling import closing
from meshrl.rollout.versions import UNSERVED


class ResumableGenerator:
    """A `Generator` for one row. Satisfies `Replaying`.

    Kept are rows that only grow: the first request has the uid for its id, and the prompt of each further one is all
    that was asked and sampled before, and something observed. A program that asks for anything else has its reasons:
    it gets what it asks for, and from there on nothing is kept.
    """

    def __init__(self, engine: Generator, journal: Journal, row: LeasedRow) -> None:
        self._engine = engine
        self._journal = journal
        self._row = row
        self._keeps = True
        self._asked = False
        self._asking = False
        self._parts: list[Int32] = [row.task.prompt_ids]
        self._past: deque[GenerateDelta] = deque()
        """What earlier holders left, from here on."""

    @property
    def version(self) -> Version:
        """The version that samples the next token."""
        return self._engine.version

    @property
    def _known(self) -> Int32:
        """All tokens of the row so far."""
        if len(self._parts) > 1:
            self._parts = [_joined(self._parts)]
        return self._parts[0]

    def observed(self, tokens: Int32) -> Int32:
        """See `Replaying.observed`."""
        here = self._keeps and bool(self._past) and _observes(self._past[0])
        if here and np.array_equal(tokens, self._known):
            return self._past[0].tokens
        return np.zeros(0, dtype=np.int32)

    async def generate(self, request: GenerateRequest) -> AsyncIterator[GenerateDelta]:
        """Sample one response; what was sampled before comes first, under the versions that did."""
        if not self._goes_on(request):
            self._stop_keeping()
            async with closing(self._engine.generate(request)) as stream:
                async for delta in stream:
                    yield delta
            return
        before = self._sampled_before()
        self._asking = True
        try:
            self._parts = [request.prompt_ids, *(delta.tokens for delta in before)]
            for delta in before:
                yield delta
            async with closing(self._engine.generate(continuation(request, before))) as stream:
                async for delta in stream:
                    self._keep(delta)
                    yield delta
        finally:
            self._asking = False

    def _goes_on(self, request: GenerateRequest) -> bool:
        """Whether `request` is what comes next in the row; what was observed before it is kept then."""
        if not self._keeps or self._asking or not (self._asked or self._begins(request)):
            return False
        again, self._asked = self._asked, True
        known = self._known
        new = request.prompt_ids[len(known) :]
        if not np.array_equal(request.prompt_ids[: len(known)], known):
            return False
        if not len(new):
            return not again  # two turns with nothing between them could not be told apart later
        if self._past:
            return _observes(said := self._past.popleft()) and np.array_equal(new, said.tokens)
        self._journal.record(self._row.uid, observation(new))
        return True

    def _begins(self, request: GenerateRequest) -> bool:
        """The first request: whether the row can be kept at all."""
        if request.request_id != str(self._row.uid):
            return False
        past = self._journal.prefix(self._row, self.version)
        if past is None:
            return False
        self._past.extend(past)
        self._journal.begin(self._row, sum(len(delta.tokens) for delta in past))
        prompt = self._row.task.prompt_ids
        if not np.array_equal(request.prompt_ids[: len(prompt)], prompt):
            self._parts = [
                prompt[:0]
            ]  # a prompt of the program's own is kept as if it were observed
        return True

    def _sampled_before(self) -> list[GenerateDelta]:
        """The part of this turn that an earlier holder sampled."""
        found = []
        while self._past and not _observes(self._past[0]):
            found.append(self._past.popleft())
        return found

    def _keep(self, delta: GenerateDelta) -> None:
        if self._past and len(delta.tokens):
            self._stop_keeping()  # the turn had ended for those who came before: theirs was another row
        self._parts.append(delta.tokens)
        self._journal.record(self._row.uid, delta)

    def _stop_keeping(self) -> None:
        self._keeps = False
        self._past.clear()
        self._journal.drop([self._row.uid])


def observation(tokens: Int32) -> GenerateDelta:
    """Tokens that nobody sampled, as the journal has them."""
    zeros = np.zeros(len(tokens), dtype=np.float32)
    return GenerateDelta(tokens=tokens, logprobs=zeros, version=UNSERVED)


def continuation(request: GenerateRequest, prefix: Sequence[GenerateDelta]) -> GenerateRequest:
    """The request for what comes after `prefix`."""
    tokens = [delta.tokens for delta in prefix]
    count = sum(map(len, tokens))
    if not count:
        return request
    left = max(0, request.sampling.max_tokens - count)
    return replace(
        request,
        prompt_ids=_joined([request.prompt_ids, *tokens]),
        sampling=replace(request.sampling, max_tokens=left),
        continued=count,
    )


def _observes(delta: GenerateDelta) -> bool:
    return delta.version == UNSERVED


def _joined(parts: Iterable[Int32]) -> Int32:
    return np.concatenate(list(parts)).astype(np.int32)
