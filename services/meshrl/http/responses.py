"""What the HTTP apps share: who asks, JSON, error headers, and the first mistake of an invalid request."""

from __future__ import annotations

import json
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from starlette.responses import JSONResponse

from meshrl.contract.errors import MeshError
from meshrl.rpc.http_server import CERTIFICATE
from meshrl.rpc.identity import Presented

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


def first_mistake(error: RequestValidationError) -> tuple[str, str]:
    """The first wrong field of the request (empty for the whole body), and what is wrong with it."""
    first = error.errors()[0]
    return ".".join(str(part) for part in first["loc"] if part != "body"), first["msg"]


def presented_by(request: Request, subject: str = "") -> Presented:
    """What the caller shows of itself; `subject` is what the request is about."""
    return Presented(
        authorization=request.headers.get("authorization", ""),
        names=getattr(request.state, CERTIFICATE, None),
        peer=request.client.host if request.client else "unknown",
        door="http",
        subject=subject,
    )
