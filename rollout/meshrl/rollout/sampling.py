"""Collects one response of an engine: tokens, log-probs, version spans; always closes the stream."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import numpy as np

from meshrl.contract.types import Float32, GenerateDelta, GenerateRequest, Int32, VersionSpan
from meshrl.rollout.ports import Generator


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """A sampled response, R tokens."""

    tokens: Int32
    """int32[R]"""
    logprobs: Float32
    """float32[R]"""
    spans: tuple[VersionSpan, ...]
    """Over `[0, R)`; neighbours with the same version are merged."""
    finish_reason: str


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
    return Response(
        tokens=np.concatenate([none, *(d.tokens for d in deltas)]).astype(np.int32),
        logprobs=np.concatenate([none, *(d.logprobs for d in deltas)]).astype(np.float32),
        spans=version_spans(deltas),
        finish_reason=deltas[-1].finish_reason if deltas else "abort",
    )


def version_spans(deltas: list[GenerateDelta]) -> tuple[VersionSpan, ...]:
    """Which version sampled which tokens."""
    spans: list[VersionSpan] = []
    end = 0
    for delta in deltas:
        start, end = end, end + len(delta.tokens)
        if start == end:
            continue
        if spans and spans[-1].version == delta.version:
            start = spans.pop().start
        spans.append(VersionSpan(version=delta.version, start=start, end=end))
    return tuple(spans)


@asynccontextmanager
async def closing(
    stream: AsyncIterator[GenerateDelta],
) -> AsyncIterator[AsyncIterator[GenerateDelta]]:
    """Close `stream` at the end, if it has `aclose` (the port requires an iterator only)."""
    try:
        yield stream
    finally:
        close = getattr(stream, "aclose", None)
        if close is not None:
            await close()
