"""Answers every failure as OpenAI's clients expect it: `{"error": {message, type, param, code}}` and a status."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

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
from meshrl.http.responses import MAX_DETAIL, AsciiJSON, first_mistake, headers_of
from meshrl.rollout.agents.requests import ContextLengthError, SessionEndedError
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
FINAL = (500, 503)
"""A fault of the engine ends the session, so clients are told not to retry, which they would do by themselves."""


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


def refused(error: MeshError) -> AsciiJSON:
    """The response to a failure."""
    status = status_of(error)[0]
    headers = headers_of(status, error)
    if status in FINAL:
        headers["x-should-retry"] = "false"
    return AsciiJSON(error_body(error), status, headers)


def refusal(status: int, code: str, detail: str) -> AsciiJSON:
    """The response to a request that a middleware refuses, sent before the app sees it."""
    body = _body(detail[:MAX_DETAIL], INVALID, None, TOO_LARGE if status == 413 else code)
    return AsciiJSON(body, status)


def install(app: FastAPI) -> None:
    """Answer every failure of `app` in this format."""

    @app.exception_handler(MeshError)
    async def mesh(request: Request, error: MeshError) -> AsciiJSON:
        return refused(error)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> AsciiJSON:
        where, why = first_mistake(error)
        message = f"{where or 'the body'}: {why}"
        return AsciiJSON(_body(message, INVALID, where or None, None), 400)

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> AsciiJSON:
        code = {404: "not_found", 405: "method_not_allowed", 408: "timeout", 413: TOO_LARGE}.get(
            error.status_code
        )
        return AsciiJSON(
            _body(str(error.detail), INVALID, None, code), error.status_code, error.headers
        )

    @app.exception_handler(Exception)
    async def broken(request: Request, error: Exception) -> AsciiJSON:
        log.error("%s %s failed", request.method, request.url.path, exc_info=error)
        return AsciiJSON(_body(f"{type(error).__name__}: {error}", "server_error", None, None), 500)


def _body(message: str, kind: str, param: str | None, code: str | None) -> dict[str, Any]:
    return {"error": {"message": message[:MAX_DETAIL], "type": kind, "param": param, "code": code}}
