"""A policy that samples given texts, for programs of several turns and for workers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence

import numpy as np

from meshrl.contract.types import (
    EngineStats,
    GenerateDelta,
    GenerateRequest,
    Int32,
    SamplingParams,
    Task,
    Version,
)
from meshrl.rollout.tokenizer import HuggingFaceTokenizer

VERSION = Version(1, 0)
END = "<|end|>"


class Scripted:
    """A `Generator`: turn `i` of any row is `turns[i]`, or what that makes of the request's text."""

    def __init__(
        self,
        tokenizer: HuggingFaceTokenizer,
        turns: Sequence[str | Callable[[str], str]],
        *,
        piece: int = 1000,
    ) -> None:
        """Deltas have `piece` tokens."""
        self.version = VERSION
        self.requests: list[GenerateRequest] = []
        self.sampled = 0
        self._tokenizer = tokenizer
        self._turns = turns
        self._piece = piece

    def stats(self) -> EngineStats:
        return EngineStats(
            version=self.version,
            running=0,
            capacity=64,
            tokens_generated=self.sampled,
            tokens_per_s=0.0,
            updates=0,
            update_pause_s=0.0,
        )

    def text(self, ids: Int32) -> str:
        return self._tokenizer.decode_all(ids.tolist())

    async def generate(self, request: GenerateRequest) -> AsyncIterator[GenerateDelta]:
        self.requests.append(request)
        _uid, _, turn = request.request_id.partition(".0/")
        begun = request.prompt_ids[: len(request.prompt_ids) - request.continued]
        said = self._turns[int(turn or 0)]
        tokens = self._tokenizer.encode(said(self.text(begun)) if callable(said) else said)
        end = min(len(tokens), request.continued + request.sampling.max_tokens)
        reason = "stop" if end == len(tokens) else "length"
        if request.continued >= end:
            yield self._delta([], reason)
        for start in range(request.continued, end, self._piece):
            part = tokens[start : min(end, start + self._piece)]
            self.sampled += len(part)
            yield self._delta(part, reason if start + len(part) == end else "")

    def _delta(self, tokens: Sequence[int], reason: str) -> GenerateDelta:
        return GenerateDelta(
            tokens=np.array(tokens, dtype=np.int32),
            logprobs=np.full(len(tokens), -0.5, dtype=np.float32),
            version=self.version,
            finish_reason=reason,
        )


def task(
    tokenizer: HuggingFaceTokenizer,
    question: str = "6*7?",
    *,
    max_tokens: int = 500,
    **changes: object,
) -> Task:
    from meshrl.contract.types import Message
    from meshrl.rollout.conversation import prompt_of

    prompt = prompt_of(tokenizer, [{"role": "user", "content": question}])
    return Task(
        run="run",
        task_id="t0",
        prompt_ids=np.array(prompt, dtype=np.int32),
        messages=(Message(role="user", content=question),),
        sampling=SamplingParams(max_tokens=max_tokens),
        **changes,  # type: ignore[arg-type]
    )
