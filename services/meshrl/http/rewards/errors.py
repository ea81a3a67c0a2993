"""Answers every failure as RFC 9457 problem JSON: a status, one line of text, and the error's details."""

from __future__ import annotations

import logging
from collections.abc import Mapping

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
from meshrl.rpc.errors import by_class

log = logging.getLogger(__name__)

STATUS: Mapping[type[MeshError], int] = {
    UserError: 422,
    UnauthenticatedError: 401,
    ForbiddenError: 403,
    NotFoundError: 404,
    ConflictError: 409,
    CapacityError: 429,
    UnavailableError: 503,
    WaitTimeoutError: 504,
    MeshError: 500,
}
"""Status by class; a subclass has its parent's."""


def problem(
    status: int, code: str, detail: str, headers: Mapping[str, str] | None = None, **values: str
) -> AsciiJSON:
    """A problem response."""
    body = {
        **values,
        "type": f"urn:meshrl:error:{code}",
        "title": code.replace("_", " "),
        "status": status,
        "detail": detail[:MAX_DETAIL],
        "code": code,
    }
    return AsciiJSON(body, status, headers, media_type="application/problem+json")


def install(app: FastAPI) -> None:
    """Answer every failure of `app` as a problem."""

    @app.exception_handler(MeshError)
    async def mesh(request: Request, error: MeshError) -> AsciiJSON:
        status = by_class(STATUS, error)
        headers = headers_of(status, error)
        return problem(status, error.code, error.message, headers, **dict(error.details))

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> AsciiJSON:
        where, why = first_mistake(error)
        return problem(422, UserError.code, f"{where or 'the body'}: {why}")

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> AsciiJSON:
        code = {404: "not_found", 405: "method_not_allowed", 413: "capacity"}.get(
            error.status_code, UserError.code
        )
        return problem(error.status_code, code, str(error.detail), error.headers)

    @app.exception_handler(Exception)
    async def broken(request: Request, error: Exception) -> AsciiJSON:
        log.error("%s %s failed", request.method, request.url.path, exc_info=error)
        return problem(500, "infra", f"{type(error).__name__}: {error}")
