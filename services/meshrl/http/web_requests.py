"""Refuses requests that a web page of another site may have sent, before any route sees them."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from meshrl.contract.errors import ForbiddenError
from meshrl.http.responses import Refuse
from meshrl.rpc.web_origin import check_origin, same_origin

FORM = "multipart/form-data"
JSON = "application/json"
CALLER_HEADER = "x-meshrl"
"""A form needs it, with any value, or a token: browsers send a form to other sites without asking, but no header of
one's own."""


class WebRequests:
    """ASGI middleware: 403 for another Host or Origin, 415 for a body that is not declared as JSON or as a form."""

    def __init__(self, app: ASGIApp, hosts: frozenset[str], refuse: Refuse) -> None:
        self._app = app
        self._hosts = hosts
        self._refuse = refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            try:
                if len(headers.getlist("host")) > 1 or len(headers.getlist("origin")) > 1:
                    raise ForbiddenError("Host and Origin may be sent once")
                check_origin(headers, self._hosts)
                problem = _content(headers)
            except ForbiddenError as error:
                await self._refuse(403, "forbidden", error.message)(scope, receive, send)
                return
            if problem:
                await self._refuse(415, "content_type", problem)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _content(headers: Headers) -> str:
    """What is wrong with the declared type of the body; empty if nothing is, or if there is no body."""
    has_body = "transfer-encoding" in headers or headers.get("content-length", "0") != "0"
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if not kind and not has_body:
        return ""
    if kind == FORM:
        origin = headers.get("origin")
        own_page = headers.get("sec-fetch-site") == "same-origin" or (
            origin is not None and same_origin(origin, headers["host"])
        )
        if own_page or "authorization" in headers or CALLER_HEADER in headers:
            return ""
        return f"a form needs the header X-Meshrl (any value), or a token; or send {JSON}"
    if kind == JSON:
        return ""
    return f"content type {kind[:80]!r}: want {JSON}, or {FORM} where a file is sent"
