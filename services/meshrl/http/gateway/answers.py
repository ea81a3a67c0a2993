"""Answers in the format of OpenAI's API: complete and streamed ones."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from meshrl.contract.errors import MeshError
from meshrl.contract.types import Float32, Int32
from meshrl.http.gateway.errors import error_body
from meshrl.rollout.agents.answer_stream import AnswerStream
from meshrl.rollout.agents.requests import ClientToolCall, SessionAnswer
from meshrl.rollout.tokenizer import Tokenizer

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerFormat:
    """Everything of an answer except its text."""

    chat: bool
    model: str
    """The name that the client used."""
    tokenizer: Tokenizer
    logprobs: bool = False
    usage: bool = False
    """Whether a stream ends with its usage."""
    id: str = field(default_factory=lambda: secrets.token_hex(16))
    created: int = field(default_factory=lambda: int(time.time()))

    def complete(self, answer: SessionAnswer) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        choice: dict[str, Any] = {"index": 0, "finish_reason": answer.finish_reason}
        if self.chat:
            calls = [_call(call) for call in answer.tool_calls]
            message: dict[str, Any] = {
                "role": "assistant",
                "content": answer.text if answer.text or not calls else None,
                "refusal": None,
            }
            choice["message"] = message | ({"tool_calls": calls} if calls else {})
        else:
            choice["text"] = answer.text
        choice["logprobs"] = self._logprobs(answer.tokens, answer.logprobs)
        return self._body([choice], usage=answer, chunk=False)

    def chunk(
        self,
        text: str,
        *,
        tokens: Int32 | None = None,
        logprobs: Float32 | None = None,
        finish_reason: str | None = None,
        first: bool = False,
        calls: Sequence[ClientToolCall] = (),
    ) -> bytes:
        """A part of a streamed answer."""
        choice: dict[str, Any] = {"index": 0, "finish_reason": finish_reason, "logprobs": None}
        if self.chat:
            delta: dict[str, Any] = {"role": "assistant"} if first else {}
            if text or first:
                delta["content"] = text
            if calls:
                delta["tool_calls"] = [{"index": i} | _call(c) for i, c in enumerate(calls)]
            choice["delta"] = delta
        else:
            choice["text"] = text
        if tokens is not None and logprobs is not None:
            choice["logprobs"] = self._logprobs(tokens, logprobs)
        return _event(self._body([choice], chunk=True))

    def usage_chunk(self, answer: SessionAnswer) -> bytes:
        """The last part of a streamed answer, if the client wants it."""
        return _event(self._body([], usage=answer, chunk=True))

    def _body(
        self, choices: list[dict[str, Any]], *, chunk: bool, usage: SessionAnswer | None = None
    ) -> dict[str, Any]:
        kind = ("chat.completion" + ".chunk" * chunk) if self.chat else "text_completion"
        body: dict[str, Any] = {
            "id": ("chatcmpl-" if self.chat else "cmpl-") + self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }
        if usage is not None:
            body["usage"] = {
                "prompt_tokens": usage.prompt_tokens,
                "completion_tokens": len(usage.tokens),
                "total_tokens": usage.prompt_tokens + len(usage.tokens),
            }
        return body

    def _logprobs(self, tokens: Int32, logprobs: Float32) -> dict[str, Any] | None:
        """Log-probs of every sampled token, even of those whose text is not shown."""
        if not self.logprobs:
            return None
        texts = [self.tokenizer.decode([token]) for token in tokens.tolist()]
        values = [float(value) for value in logprobs]
        if not self.chat:
            starts = list(accumulate(map(len, texts), initial=0))[:-1]
            return {
                "tokens": texts,
                "token_logprobs": values,
                "top_logprobs": None,
                "text_offset": starts,
            }
        content = [
            {"token": text, "logprob": value, "bytes": list(text.encode()), "top_logprobs": []}
            for text, value in zip(texts, values, strict=True)
        ]
        return {"content": content, "refusal": None}


async def streamed(asking: AnswerStream, format: AnswerFormat) -> AsyncIterator[bytes]:
    """Server-sent events, ended by `[DONE]`; an error is one event and ends the stream."""
    if format.chat:
        yield format.chunk("", first=True)
    try:
        async for piece in asking:
            if piece.text or format.logprobs:
                yield format.chunk(piece.text, tokens=piece.tokens, logprobs=piece.logprobs)
    except MeshError as error:
        yield _event(error_body(error))
        return
    answer = asking.answer
    assert answer is not None
    if answer.tail:
        yield format.chunk(answer.tail)
    if answer.tool_calls:
        yield format.chunk("", calls=answer.tool_calls)
    yield format.chunk("", finish_reason=answer.finish_reason)
    if format.usage:
        yield format.usage_chunk(answer)
    yield DONE


class StreamedAnswer(StreamingResponse):
    """Aborts the request if the client disconnects before its end."""

    def __init__(self, asking: AnswerStream, format: AnswerFormat) -> None:
        super().__init__(streamed(asking, format), media_type="text/event-stream")
        self._asking = asking

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One response."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._asking.task.cancel()


def _call(call: ClientToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(body, separators=(",", ":")).encode() + b"\n\n"
