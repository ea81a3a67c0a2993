"""Common to all engines: the token stream, which aborts its request when closed, and the check of a request."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from meshrl.contract.errors import MeshError, UserError
from meshrl.contract.types import GenerateDelta, GenerateRequest


class TokenStream:
    """The deltas of one request, in order. Closing or dropping the stream, or cancelling its reader, aborts it."""

    def __init__(self) -> None:
        self._events: asyncio.Queue[GenerateDelta | MeshError] = asyncio.Queue()
        # The queue's method, not the stream's: an engine that pushes must not keep an abandoned stream alive.
        self.push: Callable[[GenerateDelta | MeshError], None] = self._events.put_nowait
        """Add a delta, or the error that ends the stream; on the event loop only."""
        self._ended = False
        self._abort: Callable[[], None] | None = None

    def on_close(self, abort: Callable[[], None]) -> None:
        """Call `abort` if the stream is closed before its end."""
        self._abort = abort

    def __aiter__(self) -> TokenStream:
        return self

    async def __anext__(self) -> GenerateDelta:
        if self._ended:
            raise StopAsyncIteration
        try:
            event = await self._events.get()
        except asyncio.CancelledError:
            self._abort_unless_ended()
            raise
        if isinstance(event, MeshError):
            self._ended = True
            raise event
        self._ended = bool(event.finish_reason)
        return event

    async def aclose(self) -> None:
        """Abort the request if it still runs; idempotent."""
        self._abort_unless_ended()

    def __del__(self) -> None:
        self._abort_unless_ended()

    def _abort_unless_ended(self) -> None:
        ended, self._ended = self._ended, True
        if not ended and self._abort is not None:
            self._abort()


def check_request(request: GenerateRequest) -> None:
    """Raises UserError for an invalid request."""
    sampling, name = request.sampling, request.request_id
    prompt = len(request.prompt_ids) - request.continued
    if sampling.temperature < 0:
        raise UserError(f"temperature is {sampling.temperature}, want 0 (greedy) or more")
    if not 0 < sampling.top_p <= 1:
        raise UserError(f"top_p is {sampling.top_p}, want 0 < top_p <= 1")
    if sampling.top_k == 0 or sampling.top_k < -1:
        raise UserError(f"top_k is {sampling.top_k}, want a positive number, or -1 for all")
    if sampling.max_tokens < (0 if request.continued else 1):
        raise UserError(f"max_tokens is {sampling.max_tokens}, want at least 1")
    if "" in sampling.stop:
        raise UserError("an empty stop string would stop everything at once")
    if request.continued < 0:
        raise UserError(f"request {name}: continued is {request.continued}, want 0 or more")
    if prompt < 1:
        of = f": all of it is continued ({request.continued} tokens)" if request.continued else ""
        raise UserError(f"request {name}: the prompt is empty{of}")


def response_before(request: GenerateRequest) -> list[int]:
    """The response tokens that a continued request begins with."""
    tokens: list[int] = request.prompt_ids[len(request.prompt_ids) - request.continued :].tolist()
    return tokens
