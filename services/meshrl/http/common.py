"""Shared parts of the HTTP apps: callers, a limit of the body, JSON, failures as problem JSON (RFC 9457)."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from meshrl.contract.errors import (
    BusyError,
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
from meshrl.rpc.call_limits import SMALL_BYTES, Room
from meshrl.rpc.credentials import sha256
from meshrl.rpc.errors import by_class
from meshrl.rpc.http_server import CERTIFICATE
from meshrl.rpc.identity import Presented
from meshrl.rpc.web_origin import Refuse

MAX_DETAIL = 2000
"""Most characters of an error message."""


class AsciiJSON(JSONResponse):
    """JSON in ASCII, so that text with lone surrogates can be sent too."""

    def render(self, content: Any) -> bytes:
        """The body."""
        return json.dumps(content, allow_nan=False, separators=(",", ":")).encode()


def headers_of(status: int, error: MeshError) -> dict[str, str]:
    """Headers of an error response: WWW-Authenticate for 401, Retry-After where the error has `retry_after_s`."""
    headers = {}
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if wait_s := error.details.get("retry_after_s"):
        headers["Retry-After"] = str(max(1, round(float(wait_s))))
    return headers


def first_mistake(error: RequestValidationError | ValidationError) -> tuple[str, str]:
    """The first wrong field of the request (empty for the whole body), and what is wrong with it."""
    first = error.errors()[0]
    return ".".join(str(part) for part in first["loc"] if part != "body"), first["msg"]


def presented_by(
    request: Request, subject: str = "", *, authorization: str | None = None
) -> Presented:
    """The identity that a request presents.

    Args:
        request: The request.
        subject: Name of the object of the request.
        authorization: In place of its header.
    """
    if authorization is None:
        authorization = request.headers.get("authorization", "")
    return Presented(
        authorization=authorization,
        names=getattr(request.state, CERTIFICATE, None),
        peer=request.client.host if request.client else "unknown",
        door="http",
        subject=subject,
    )


BODY_S = 60.0
"""Seconds for a whole body."""
MOST_BODIES = 512 << 20
"""Bytes of bodies of which more is to come, three quarters of them from one caller."""


class BodyLimit:
    """ASGI middleware: 413 beyond `limit` bytes, announced or sent, 408 after `body_s`; `refuse` answers.

    429 for a body that is not small while others of which more is to come take MOST_BODIES.
    """

    def __init__(self, app: ASGIApp, limit: int, refuse: Refuse, body_s: float = BODY_S) -> None:
        self._bodies = Room("bytes of unfinished requests", MOST_BODIES)
        self._body_s = body_s
        self._app = app
        self._refuse = refuse
        self._limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        detail = f"the request is larger than {self._limit} bytes"
        headers = dict(scope["headers"])
        announced = headers.get(b"content-length", b"0")
        if announced.isdigit() and int(announced) > self._limit:
            await self._refuse(413, "capacity", detail)(scope, receive, send)
            return
        shown = headers.get(b"authorization") or headers.get(b"x-api-key")
        # Agents share an address, and have keys of their own, which no message may show.
        address = (scope.get("client") or ("unknown",))[0]
        holder = f"caller {sha256(shown.decode('latin-1'))[:8]}" if shown else address
        received = held = 0
        deadline: float | None = asyncio.get_running_loop().time() + self._body_s

        def hold(size: int) -> None:
            nonlocal held
            if size > held:
                self._bodies.take(holder, size - held)
            elif size < held:
                self._bodies.give_back(holder, held - size)
            held = size

        async def bounded() -> Message:
            nonlocal received, deadline
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                # Raised inside the app, which answers it.
                raise HTTPException(408, f"the body took longer than {self._body_s:g} s") from None
            if not message.get("more_body", False):
                deadline = None  # what comes next is that the client disconnects
            received += len(message.get("body", b""))
            if received > self._limit:
                raise HTTPException(413, detail)  # raised inside the app, which answers it
            try:
                hold(received if deadline and received > SMALL_BYTES else 0)
            except BusyError as error:
                raise HTTPException(429, error.message, {"Retry-After": "1"}) from None
            return message

        try:
            await self._app(scope, bounded, send)
        finally:
            hold(0)


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
        code = {404: "not_found", 405: "method_not_allowed", 413: "capacity", 429: "capacity"}.get(
            error.status_code, UserError.code
        )
        return problem(error.status_code, code, str(error.detail), error.headers)

    @app.exception_handler(Exception)
    async def broken(request: Request, error: Exception) -> AsciiJSON:
        log.error("%s %s failed", request.method, request.url.path, exc_info=error)
        return problem(500, "infra", f"{type(error).__name__}: {error}")
