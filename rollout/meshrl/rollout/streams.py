"""The token stream of every engine, which aborts its request when closed, and one response collected from it."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from meshrl.contract.errors import InfraError, MeshError, UserError
from meshrl.contract.routed_experts import Experts, RoutedExperts
from meshrl.contract.types import (
    Float32,
    GenerateDelta,
    GenerateRequest,
    Int32,
    PromptLogprobs,
    Version,
    VersionSpan,
)
from meshrl.rollout.ports import Generator


class TokenStream:
    """The deltas of one request, in order. Closing or dropping the stream, or cancelling its reader, aborts it."""

    def __init__(self) -> None:
        self._events: asyncio.Queue[GenerateDelta | MeshError] = asyncio.Queue()
        # The queue's method, not the stream's: an engine that pushes must not keep an abandoned stream alive.
        self.push: Callable[[GenerateDelta | MeshError], None] = self._events.put_nowait
        """Add a delta, or the error that ends the stream; on the event loop only."""
        self._ended = False
        self.on_close: Callable[[], object] | None = None
        """Called if the stream is closed before its end; the engine sets it."""

    def __aiter__(self) -> TokenStream:
        return self

    async def __anext__(self) -> GenerateDelta:
        if self._ended:
            raise StopAsyncIteration
        try:
            event = await self._events.get()
        except asyncio.CancelledError:
            self.close()
            raise
        if isinstance(event, MeshError):
            self._ended = True
            raise event
        self._ended = bool(event.finish_reason)
        return event

    async def aclose(self) -> None:
        """Abort the request if it still runs; idempotent."""
        self.close()

    def close(self) -> None:
        """Close as `aclose` does, without awaiting."""
        ended, self._ended = self._ended, True
        if not ended and self.on_close is not None:
            self.on_close()

    __del__ = close


CUTS = {False: "sequential", True: "joint"}
"""How top_k and top_p cut together, as `rollout.top_k_top_p` names it, by `joint_cut`."""


def check_request(
    request: GenerateRequest,
    *,
    joint_cut: bool = False,
    pictures: bool = False,
    vocab_size: int | None = None,
) -> None:
    """Raises UserError for an invalid request, or one that wants what the engine does not do: a cut, `pictures`."""
    sampling, name = request.sampling, request.request_id
    if request.media and not pictures:
        raise UserError(f"request {name}: it has pictures, which vllm and sglang alone read")
    prompt = len(request.prompt_ids) - request.continued
    if sampling.fault:
        raise UserError(sampling.fault)
    if vocab_size is not None and (foreign := max(sampling.logit_bias, default=0)) >= vocab_size:
        raise UserError(f"logit_bias names token {foreign}, the model knows 0 to {vocab_size - 1}")
    if sampling.top_k == 0 or sampling.top_k < -1:
        raise UserError(f"top_k is {sampling.top_k}, want a positive number, or -1 for all")
    if sampling.cuts_twice and sampling.joint_cut != joint_cut:
        rule, key = CUTS[joint_cut], CUTS[sampling.joint_cut]
        raise UserError(
            f"top_k {sampling.top_k} with top_p {sampling.top_p}: this engine cuts {rule}, and the run's"
            f" rollout.top_k_top_p is {key}: engines of both kinds sample different distributions; use one of the two"
        )
    if sampling.max_tokens < (0 if request.continued else 1):
        raise UserError(f"max_tokens is {sampling.max_tokens}, want at least 1")
    if "" in sampling.stop:
        raise UserError("an empty stop string would stop everything at once")
    if request.continued < 0:
        raise UserError(f"request {name}: continued is {request.continued}, want 0 or more")
    if request.experts_from is not None and not 0 <= request.experts_from <= len(
        request.prompt_ids
    ):
        raise UserError(
            f"request {name}: experts from {request.experts_from} of {len(request.prompt_ids)} prompt tokens"
        )
    if prompt < 1:
        of = f": all of it is continued ({request.continued} tokens)" if request.continued else ""
        raise UserError(f"request {name}: the prompt is empty{of}")


def response_before(request: GenerateRequest) -> list[int]:
    """The response tokens that a continued request begins with."""
    tokens: list[int] = request.prompt_ids[len(request.prompt_ids) - request.continued :].tolist()
    return tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """A sampled response, R tokens."""

    tokens: Int32
    """int32[R]"""
    logprobs: Float32
    """float32[R]"""
    spans: tuple[VersionSpan, ...]
    """Version spans over `[0, R)`; neighbours with the same version are merged."""
    finish_reason: str
    prompt: PromptLogprobs | None = None
    """None unless the request asked for them."""


async def sample(engine: Generator, request: GenerateRequest) -> Response:
    """Sample `request` to its end; the request is aborted if this is cancelled."""
    deltas: list[GenerateDelta] = []
    async with closing(engine.generate(request)) as stream:
        async for delta in stream:
            deltas.append(delta)
    return response_of(deltas)


def response_of(deltas: list[GenerateDelta]) -> Response:
    """The deltas of one request as one response."""
    none = np.empty(0)
    spans: list[VersionSpan] = []
    end = 0
    for delta in deltas:
        start, end = end, end + len(delta.tokens)
        if start == end:
            continue
        if spans and spans[-1].version == delta.version:
            start = spans.pop().start
        spans.append(VersionSpan(version=delta.version, start=start, end=end))
    return Response(
        tokens=np.concatenate([none, *(d.tokens for d in deltas)]).astype(np.int32),
        logprobs=np.concatenate([none, *(d.logprobs for d in deltas)]).astype(np.float32),
        spans=tuple(spans),
        finish_reason=deltas[-1].finish_reason if deltas else "abort",
        prompt=next((delta.prompt for delta in deltas if delta.prompt is not None), None),
    )


class closing:
    """Close `stream` at the end, if it has `aclose` (the port requires an iterator only)."""

    __slots__ = ("_stream",)

    def __init__(self, stream: AsyncIterator[GenerateDelta]) -> None:
        self._stream = stream

    async def __aenter__(self) -> AsyncIterator[GenerateDelta]:
        return self._stream

    async def __aexit__(self, *_: object) -> None:
        close = getattr(self._stream, "aclose", None)
        if close is not None:
            await close()


@dataclass(frozen=True, slots=True, eq=False)
class _Sequence:
    """A prompt with its response, and the experts of its first tokens."""

    tokens: Int32
    experts: npt.NDArray[Any]
    """[n, L, K], n at most the number of tokens."""

    def known(self, tokens: Int32) -> Experts:
        """[n, L, K]: of the first `tokens`, as far as they are these and known."""
        shorter = min(len(self.experts), len(tokens))
        different = np.flatnonzero(self.tokens[:shorter] != tokens[:shorter])
        found: Experts = self.experts[: different[0] if len(different) else shorter]
        return found


class ExpertRecorder:
    """A `Generator` for one row: gathers the experts of its tokens from the requests that its program sends.

    The prompt of a later turn is computed again, perhaps by other weights: its tokens keep the experts that they had
    in their own turn.
    """

    def __init__(self, engine: Generator) -> None:
        self._engine = engine
        self._sequences: list[_Sequence] = []

    @property
    def version(self) -> Version:
        """The version that samples the next token."""
        return self._engine.version

    async def generate(self, request: GenerateRequest) -> AsyncIterator[GenerateDelta]:
        """Sample one response; its deltas have no experts. Raises InfraError where the engine tells of none."""
        prompt = request.prompt_ids
        known = self._known(prompt)
        tokens, experts = [prompt], [known]
        asked = replace(request, experts_from=len(known))
        try:
            async with closing(self._engine.generate(asked)) as stream:
                async for delta in stream:
                    tokens.append(delta.tokens)
                    if delta.experts is not None:
                        experts.append(delta.experts)
                    yield replace(delta, experts=None)
        finally:
            self._keep(np.concatenate(tokens), [part for part in experts if part.size])
        fed, told = sum(map(len, tokens)) - 1, sum(map(len, experts))
        if fed >= len(prompt) and told != fed and delta.finish_reason != "abort":
            raise InfraError(
                f"request {request.request_id}: the engine returned the experts of {told} of {fed} tokens"
            )

    def column(self, tokens: Int32, starts: Sequence[int] = (0,)) -> RoutedExperts:
        """Experts of every token of a row, whose parts begin at `starts`.

        They are unknown for tokens of no request, and for the last one of a part.
        """
        found = [
            (start, self._known(tokens[start:end]))
            for start, end in itertools.pairwise([*starts, len(tokens)])
        ]
        shape = max(part.shape[1:] for _, part in found)
        experts = np.zeros((len(tokens), *shape), np.result_type(*(part for _, part in found)))
        for start, part in found:
            if part.size:
                experts[start : start + len(part)] = part
        return RoutedExperts.pack(experts)

    def _known(self, tokens: Int32) -> Experts:
        none = np.zeros((0, 0, 0), np.uint8)
        return max([none, *(each.known(tokens) for each in self._sequences)], key=len)

    def _keep(self, tokens: Int32, experts: list[Experts]) -> None:
        if not experts:
            return
        made = _Sequence(tokens, np.concatenate(experts))
        # A sequence that continues in this one has nothing to add.
        others = [s for s in self._sequences if len(made.known(s.tokens)) < len(s.experts)]
        self._sequences = [*others, made]
