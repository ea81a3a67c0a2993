"""One running answer: passes tokens from the engine to a client; an end of either ends the other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Self

from meshrl.contract.errors import InfraError, MeshError, UserError
from meshrl.contract.types import GenerateDelta, GenerateRequest
from meshrl.rollout.agents.requests import AnswerPart, ClientToolCall, SessionAnswer, parse_calls
from meshrl.rollout.ports import Generator
from meshrl.rollout.streams import Response, closing, response_of
from meshrl.rollout.tokenizer import Tokenizer
from meshrl.rollout.tools.formats.hermes import OPENING

BROKEN = "�"
"""A tokenizer decodes a part of a character to this."""
CHARACTER_TOKENS = 4
"""The most tokens of one character in a byte-level vocabulary."""


class VisibleText:
    """The text of a response that a client sees: up to a stop string, no tool calls.

    Shown text never changes: text that may still change is held back. Each token is decoded a bounded number of
    times; of the text, only what a stop string or a tool call may begin with is looked at again.
    """

    def __init__(self, tokenizer: Tokenizer, *, stop: Sequence[str], tools: bool) -> None:
        self.hidden = ""
        """After `end`: the stop string that ended the response, and the rest of its last token."""
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._tools = tools
        self._marks = (*self._stop, OPENING) if tools else self._stop
        self._ids: list[int] = []
        self._context, self._read = 0, 0
        """Tokens before `_read` have their text; it is what those from `_context` on are decoded with, whose text may
        depend on them: in some vocabularies the first token loses a blank."""
        self._context_text = ""
        self._wanted = 0
        """Number of tokens at which to decode again."""
        self._held = ""
        """Text that is not shown, because a mark may begin with it."""
        self._shown = 0
        """In characters."""
        self._marked = False
        """There is a mark in the text: nothing more is shown before the end."""

    def feed(self, tokens: Sequence[int]) -> str:
        """Add tokens; returns the text that can be shown now."""
        self._ids += tokens
        if self._marked or len(self._ids) < self._wanted:
            return ""
        text = self._held + self._decoded()
        marks = [at for mark in self._marks if (at := text.find(mark)) >= 0]
        self._marked = bool(marks)
        held = max((_held(text, mark) for mark in self._marks), default=0)
        end = min([*marks, len(text) - held])
        self._held = text[end:]
        self._shown += end
        return text[:end]

    def end(self) -> tuple[str, str, tuple[ClientToolCall, ...]]:
        """The whole text, the part of it not shown yet, and the tool calls after it."""
        text = self._tokenizer.decode(self._ids)
        found = [at for at in (text.find(stop) for stop in self._stop) if at >= 0]
        cut = min(found, default=len(text))
        text, self.hidden = text[:cut], text[cut:]
        calls: tuple[ClientToolCall, ...] = ()
        if self._tools:
            text, calls = parse_calls(text)
        return text, text[self._shown :], calls

    @property
    def stop_string(self) -> str:
        """After `end`: the stop string that ended the response; empty: none did."""
        return next((stop for stop in self._stop if self.hidden.startswith(stop)), "")

    def _decoded(self) -> str:
        """The text of the tokens from `_read` on, up to the last that ends a character; `_read` moves behind it."""
        length = len(self._ids)
        for end in range(length, max(self._read, length - CHARACTER_TOKENS), -1):
            text = self._tokenizer.decode(self._ids[self._context : end])
            new = text[len(self._context_text) :]
            if new and not new.endswith(BROKEN):
                self._context, self._read = self._read, end
                self._context_text = self._tokenizer.decode(self._ids[self._context : end])
                return new
        undecided = length - self._read
        if undecided > CHARACTER_TOKENS:
            # Tokens without text, or bytes that are no character: trying each time they are twice as many adds up to
            # a multiple of their number.
            self._wanted = length + undecided
        return ""


def _held(text: str, mark: str) -> int:
    """Characters at the end of `text` with which `mark` may begin."""
    return next(
        (n for n in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:n])), 0
    )


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
        ended: Callable[[Response, SessionAnswer], None],
        fault: Callable[[MeshError], None],
        conversation: str = "",
    ) -> None:
        """`ended` gets a complete response, before the client gets its end; `fault` gets a fault of the engine."""
        self.answer: SessionAnswer | None = None
        self.conversation = conversation
        """The name of the conversation that it continues."""
        self._engine = engine
        self._request = request
        self._visible = visible
        self._ended = ended
        self._fault = fault
        self.prompt = request.prompt_ids
        """int32[p]: everything before the answer."""
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

    async def whole(self) -> SessionAnswer:
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
            self.answer = SessionAnswer(
                text=text,
                tail=tail,
                tool_calls=calls,
                finish_reason="tool_calls" if calls else response.finish_reason,
                stop_string=self._visible.stop_string,
                prompt_tokens=len(self.prompt),
                tokens=response.tokens,
                logprobs=response.logprobs,
                prompt=response.prompt,
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
        response = response_of(deltas)
        if self._request.prompt_top is not None and response.prompt is None:
            raise UserError("prompt_logprobs: the engine returned none for this prompt")
        return response
