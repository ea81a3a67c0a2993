"""The generator that a program gets where checkpoints are kept: it continues where the last worker stopped.

    the row      prompt │ sampled │ observed │ sampled ……
    checkpoint            ●●●●●●●   ○○○○○○○○   ●●●●●●●     ● with the version that sampled it, ○ with UNSERVED

The program of a row with a checkpoint runs again from its start: turns are answered from the checkpoint as far as it
reaches.
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
from meshrl.rollout.generation_checkpoint import GenerationCheckpointer
from meshrl.rollout.ports import UNSERVED, Generator
from meshrl.rollout.streams import closing


class ResumableGenerator:
    """A `Generator` for one row. Satisfies `Replaying`.

    Checkpoints are kept of rows that only grow: the id of the first request is the uid, and the prompt of each
    further one is everything requested and sampled before, plus an observation. Any other request is passed to the
    engine, and from there on no checkpoint is kept.
    """

    def __init__(
        self, engine: Generator, checkpointer: GenerationCheckpointer, row: LeasedRow
    ) -> None:
        self._engine = engine
        self._checkpointer = checkpointer
        self._row = row
        self._recording = True
        self._asked = False
        self._asking = False
        self._parts: list[Int32] = [row.task.prompt_ids]
        self._past: deque[GenerateDelta] = deque()
        """The rest of the checkpoint that earlier workers left."""

    @property
    def version(self) -> Version:
        """The version that samples the next token."""
        return self._engine.version

    @property
    def _known(self) -> Int32:
        """All tokens of the row so far, int32[T]."""
        if len(self._parts) > 1:
            self._parts = [_joined(self._parts)]
        return self._parts[0]

    def observed(self, tokens: Int32) -> Int32:
        """See `Replaying.observed`."""
        at_observation = self._recording and bool(self._past) and _observes(self._past[0])
        if at_observation and np.array_equal(tokens, self._known):
            return self._past[0].tokens
        return np.zeros(0, dtype=np.int32)

    async def generate(self, request: GenerateRequest) -> AsyncIterator[GenerateDelta]:
        """Sample one response; tokens of the checkpoint come first, with the versions that sampled them."""
        if not self._continues_row(request):
            self._stop_recording()
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
                    self._record(delta)
                    yield delta
        finally:
            self._asking = False

    def _continues_row(self, request: GenerateRequest) -> bool:
        """Whether `request` is the next one of a growing row; if so, the observation before it is recorded."""
        if not self._recording or self._asking or not (self._asked or self._begins(request)):
            return False
        has_turns, self._asked = self._asked, True
        known = self._known
        new = request.prompt_ids[len(known) :]
        if not np.array_equal(request.prompt_ids[: len(known)], known):
            return False
        if not len(new):
            return (
                not has_turns
            )  # two turns without an observation between them cannot be separated later
        if self._past:
            past = self._past.popleft()
            return _observes(past) and np.array_equal(new, past.tokens)
        self._checkpointer.record(self._row.uid, observation(new))
        return True

    def _begins(self, request: GenerateRequest) -> bool:
        """Whether checkpoints of the row can be kept, judged by its first request."""
        if request.request_id != str(self._row.uid):
            return False
        past = self._checkpointer.prefix(self._row, self.version)
        if past is None:
            return False
        self._past.extend(past)
        self._checkpointer.begin(self._row, sum(len(delta.tokens) for delta in past))
        prompt = self._row.task.prompt_ids
        if not np.array_equal(request.prompt_ids[: len(prompt)], prompt):
            self._parts = [
                prompt[:0]
            ]  # a prompt that the program made itself is recorded as an observation
        return True

    def _sampled_before(self) -> list[GenerateDelta]:
        """The part of this turn that an earlier worker sampled."""
        deltas = []
        while self._past and not _observes(self._past[0]):
            deltas.append(self._past.popleft())
        return deltas

    def _record(self, delta: GenerateDelta) -> None:
        if self._past and len(delta.tokens):
            self._stop_recording()  # the turn ended earlier in the checkpoint: it is of another course of the row
        self._parts.append(delta.tokens)
        self._checkpointer.record(self._row.uid, delta)

    def _stop_recording(self) -> None:
        self._recording = False
        self._past.clear()
        self._checkpointer.drop([self._row.uid])


def observation(tokens: Int32) -> GenerateDelta:
    """Tokens that the policy did not sample, int32[k], as the checkpoint stores them."""
    zeros = np.zeros(len(tokens), dtype=np.float32)
    return GenerateDelta(tokens=tokens, logprobs=zeros, version=UNSERVED)


def continuation(request: GenerateRequest, prefix: Sequence[GenerateDelta]) -> GenerateRequest:
    """The request for the tokens after `prefix`."""
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
