"""What the responses of both HTTP apps share: JSON, error headers, and the first mistake of an invalid request."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeAlias

from fastapi.exceptions import RequestValidationError
from starlette.responses import JSONResponse, Response

from meshrl.contract.errors import MeshError

MAX_DETAIL = 2000
"""Most characters of an error message."""
Refuse: TypeAlias = Callable[[int, str, str], Response]
"""Makes the response to a request that a middleware refuses, from status, code and detail."""


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
