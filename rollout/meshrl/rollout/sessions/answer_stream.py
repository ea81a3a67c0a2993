"""One running answer: passes tokens from the engine to a client; an end of either ends the other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Self

from meshrl.contract.errors import InfraError, MeshError, UserError
from meshrl.contract.types import GenerateDelta, GenerateRequest
from meshrl.rollout.ports import Generator
from meshrl.rollout.sessions.requests import Answer, AnswerPart
from meshrl.rollout.sessions.visible_text import VisibleText
from meshrl.rollout.streams import Response, closing, response_of

ENDS = ("stop", "length")
"""Finish reasons of a complete response."""


class AnswerStream:
    """Iterate for the parts of the answer; then `answer` is set. `aclose` before the end aborts the request."""

    def __init__(
        self,
        engine: Generator,
        request: GenerateRequest,
        visible: VisibleText,
        *,
        ended: Callable[[Response, Answer], None],
        fault: Callable[[MeshError], None],
        conversation: str = "",
    ) -> None:
        """`ended` gets a complete response, before the client gets its end; `fault` gets a fault of the engine."""
        self.answer: Answer | None = None
        self.conversation = conversation
        """The name of the conversation that it continues."""
        self._engine = engine
        self._request = request
        self._visible = visible
        self._ended = ended
        self._fault = fault
        self._events: asyncio.Queue[AnswerPart | MeshError | None] = asyncio.Queue()
        self.task = asyncio.create_task(self._run(), name=f"ask {request.request_id}")

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> AnswerPart:
        event = await self._events.get()
        if event is None:
            raise StopAsyncIteration
        if isinstance(event, MeshError):
            raise event
        return event

    async def whole(self) -> Answer:
        """Wait for the complete answer. Raises the error that ended it early."""
        async for _ in self:
            pass
        assert self.answer is not None
        return self.answer

    def end(self, error: MeshError) -> None:
        """Abort the request; the reader gets `error`."""
        if self.task.cancel():
            self._events.put_nowait(error)

    async def aclose(self) -> None:
        """Abort the request if it still runs; idempotent."""
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)

    async def _run(self) -> None:
        try:
            response = await self._sampled()
        except UserError as error:  # the engine cannot run the request
            self._events.put_nowait(error)
        except Exception as error:
            fault = error
            if not isinstance(fault, MeshError):
                fault = InfraError(f"{type(error).__name__}: {error}")
            self._fault(fault)
            self._events.put_nowait(fault)
        else:
            text, tail, calls = self._visible.end()
            self.answer = Answer(
                text=text,
                tail=tail,
                tool_calls=calls,
                finish_reason="tool_calls" if calls else response.finish_reason,
                prompt_tokens=len(self._request.prompt_ids),
                tokens=response.tokens,
                logprobs=response.logprobs,
            )
            self._ended(response, self.answer)
            self._events.put_nowait(None)

    async def _sampled(self) -> Response:
        deltas: list[GenerateDelta] = []
        async with closing(self._engine.generate(self._request)) as stream:
            async for delta in stream:
                deltas.append(delta)
                if len(delta.tokens):
                    text = self._visible.feed(delta.tokens.tolist())
                    self._events.put_nowait(
                        AnswerPart(text=text, tokens=delta.tokens, logprobs=delta.logprobs)
                    )
        reason = deltas[-1].finish_reason if deltas else "abort"
        if reason not in ENDS:
            raise InfraError(f"the engine aborted request {self._request.request_id}: {reason}")
        return response_of(deltas)
