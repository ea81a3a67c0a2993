"""Answers and failures in the format of OpenAI's API; complete answers and streamed ones."""

from __future__ import annotations

import json
import logging
import re
import secrets
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Protocol

import numpy as np
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from meshrl.contract.errors import (
    CapacityError,
    ConflictError,
    ForbiddenError,
    MeshError,
    NotFoundError,
    UnauthenticatedError,
    UnavailableError,
    UserError,
    WaitTimeoutError,
)
from meshrl.contract.types import Float32, Int32, Json
from meshrl.http.common import MAX_DETAIL, AsciiJSON, first_mistake, headers_of
from meshrl.rollout.agents.answer_stream import AnswerStream
from meshrl.rollout.agents.requests import (
    ClientToolCall,
    ContextLengthError,
    SessionAnswer,
    SessionEndedError,
)
from meshrl.rollout.tokenizer import Tokenizer
from meshrl.rpc.errors import by_class

log = logging.getLogger(__name__)

INVALID = "invalid_request_error"
TOO_LARGE = "too_large"
STATUS: Mapping[type[MeshError], tuple[int, str, str | None]] = {
    ContextLengthError: (400, INVALID, "context_length_exceeded"),
    UserError: (400, INVALID, None),
    UnauthenticatedError: (401, INVALID, "invalid_api_key"),
    ForbiddenError: (403, INVALID, "wrong_session"),
    NotFoundError: (404, INVALID, "not_found"),
    WaitTimeoutError: (408, "timeout", "no_row"),
    ConflictError: (409, INVALID, "conflict"),
    SessionEndedError: (410, INVALID, "session_ended"),
    CapacityError: (429, "rate_limit_error", "rate_limit_exceeded"),
    UnavailableError: (503, "server_error", "unavailable"),
    MeshError: (500, "server_error", "engine_fault"),
}
"""Status, type and code by class; a subclass has its parent's."""
ANTHROPIC_PATH = re.compile("/messages(/count_tokens)?/?$")
ANTHROPIC_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
FINAL = (500, 503)
"""A fault of the engine ends the session, so clients get a header against their own retries."""


class ParameterError(UserError):
    """A field of a request is wrong; `param` names it."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message, param=param)


def error_body(error: MeshError) -> dict[str, Any]:
    """The JSON of a failure."""
    _, kind, code = status_of(error)
    return _body(error.message, kind, error.details.get("param"), code)


def status_of(error: MeshError) -> tuple[int, str, str | None]:
    """Status, type and code."""
    return by_class(STATUS, error)


def anthropic_error(body: Mapping[str, Any], status: int) -> dict[str, Any]:
    """The JSON of a failure as Anthropic's clients read it, from OpenAI's."""
    kind = ANTHROPIC_KINDS.get(status, INVALID if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": body["error"]["message"]}}


class FailedRequest:
    """The answer to a request that failed, an ASGI app: in the dialect of the request's path."""

    def __init__(
        self, status: int, body: dict[str, Any], headers: Mapping[str, str] | None = None
    ) -> None:
        self._status = status
        self._body = body
        self._headers = headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One response."""
        await self.response(scope["path"])(scope, receive, send)

    def response(self, path: str) -> AsciiJSON:
        """The response on a path."""
        body = self._body
        if ANTHROPIC_PATH.search(path):
            body = anthropic_error(body, self._status)
        return AsciiJSON(body, self._status, self._headers)


def refused(error: MeshError) -> FailedRequest:
    """The answer to a failure."""
    status = status_of(error)[0]
    headers = headers_of(status, error)
    if status in FINAL:
        headers["x-should-retry"] = "false"
    return FailedRequest(status, error_body(error), headers)


def refusal(status: int, code: str, detail: str) -> FailedRequest:
    """The answer to a request that a middleware refuses, sent before the app sees it."""
    body = _body(detail[:MAX_DETAIL], INVALID, None, TOO_LARGE if status == 413 else code)
    return FailedRequest(status, body)


def install(app: FastAPI) -> None:
    """Answer every failure of `app` in this format."""

    @app.exception_handler(MeshError)
    async def mesh(request: Request, error: MeshError) -> AsciiJSON:
        return refused(error).response(request.url.path)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> AsciiJSON:
        where, why = first_mistake(error)
        message = f"{where or 'the body'}: {why}"
        body = _body(message, INVALID, where or None, None)
        return FailedRequest(400, body).response(request.url.path)

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> AsciiJSON:
        code = {
            404: "not_found",
            405: "method_not_allowed",
            408: "timeout",
            413: TOO_LARGE,
            429: "rate_limit_exceeded",
        }.get(error.status_code)
        body = _body(str(error.detail), INVALID, None, code)
        return FailedRequest(error.status_code, body, error.headers).response(request.url.path)

    @app.exception_handler(Exception)
    async def broken(request: Request, error: Exception) -> AsciiJSON:
        log.error("%s %s failed", request.method, request.url.path, exc_info=error)
        body = _body(f"{type(error).__name__}: {error}", "server_error", None, None)
        return FailedRequest(500, body).response(request.url.path)


def _body(message: str, kind: str, param: str | None, code: str | None) -> dict[str, Any]:
    return {"error": {"message": message[:MAX_DETAIL], "type": kind, "param": param, "code": code}}


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
    prompt: bool = False
    """Whether the answer tells log-probs of the prompt."""
    echo: bool = False
    """Whether the answer begins with the prompt."""
    id: str = field(default_factory=lambda: secrets.token_hex(16))
    created: int = field(default_factory=lambda: int(time.time()))

    def complete(self, asking: AnswerStream, answer: SessionAnswer) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        choice: dict[str, Any] = {"index": 0, "finish_reason": answer.finish_reason}
        told = {"prompt_logprobs": self._of_prompt(asking, answer)} if self.prompt else {}
        tokens, logprobs = answer.tokens, answer.logprobs
        if self.chat:
            calls = [_call(call) for call in answer.tool_calls]
            message: dict[str, Any] = {
                "role": "assistant",
                "content": answer.text if answer.text or not calls else None,
                "refusal": None,
            }
            choice["message"] = message | ({"tool_calls": calls} if calls else {})
        else:
            before = self.tokenizer.decode(asking.prompt.tolist()) if self.echo else ""
            choice |= {"text": before + answer.text, **told}
            if self.echo and answer.prompt is not None:
                tokens = np.concatenate([asking.prompt, tokens])
                logprobs = np.concatenate([answer.prompt.logprobs, logprobs])
        choice["logprobs"] = self._logprobs(tokens, logprobs)
        return self._body([choice], usage=answer, chunk=False) | (told if self.chat else {})

    def _of_prompt(self, asking: AnswerStream, answer: SessionAnswer) -> list[Json]:
        """As vLLM tells them: at each place its token and the likeliest, by token; null at the first."""
        found = answer.prompt
        assert found is not None
        places: list[Json] = [None]
        for at, token in enumerate(asking.prompt[1:].tolist(), 1):
            top = zip(found.top_ids[at].tolist(), found.top_logprobs[at].tolist(), strict=True)
            # Of a token that is not among the likeliest, the rank is not known.
            ranked: dict[int, tuple[float, int | None]] = {token: (float(found.logprobs[at]), None)}
            ranked |= {each: (value, rank) for rank, (each, value) in enumerate(top, 1)}
            places.append(
                {
                    str(each): {
                        "logprob": value,
                        "rank": rank,
                        "decoded_token": self.tokenizer.decode([each]),
                    }
                    for each, (value, rank) in ranked.items()
                }
            )
        return places

    async def stream(self, asking: AnswerStream) -> AsyncIterator[bytes]:
        """Server-sent events, ended by `[DONE]`; an error is one event and ends the stream."""
        if self.chat:
            yield self.chunk("", first=True)
        try:
            async for piece in asking:
                if piece.text or self.logprobs:
                    yield self.chunk(piece.text, tokens=piece.tokens, logprobs=piece.logprobs)
        except MeshError as error:
            yield _event(error_body(error))
            return
        answer = asking.answer
        assert answer is not None
        if answer.tail:
            yield self.chunk(answer.tail)
        if answer.tool_calls:
            yield self.chunk("", calls=answer.tool_calls)
        yield self.chunk("", finish_reason=answer.finish_reason)
        if self.usage:
            yield self.usage_chunk(answer)
        yield DONE

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
        values = [None if np.isnan(value) else float(value) for value in logprobs]
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


class Format(Protocol):
    """A dialect's form of an answer."""

    def complete(self, asking: AnswerStream, answer: SessionAnswer) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        ...

    def stream(self, asking: AnswerStream) -> AsyncIterator[bytes]:
        """Server-sent events; an error is one event and ends the stream."""
        ...


class StreamedAnswer(StreamingResponse):
    """Aborts the request if the client disconnects before its end."""

    def __init__(self, asking: AnswerStream, format: Format) -> None:
        super().__init__(format.stream(asking), media_type="text/event-stream")
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


def named_event(kind: str, **fields: Any) -> bytes:
    """A server-sent event with its name, as all dialects but chat and completions have them."""
    body = json.dumps({"type": kind, **fields}, separators=(",", ":"))
    return f"event: {kind}\ndata: {body}\n\n".encode()


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(body, separators=(",", ":")).encode() + b"\n\n"
