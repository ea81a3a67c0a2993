"""Limits the body of every request, with and without a Content-Length."""

from __future__ import annotations

from collections.abc import Callable

from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send


class BodyLimit:
    """ASGI middleware: 413 beyond `limit` bytes, announced or sent; `refuse(status, code, detail)` answers."""

    def __init__(
        self, app: ASGIApp, limit: int, refuse: Callable[[int, str, str], Response]
    ) -> None:
        self._app = app
        self._refuse = refuse
        self._limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        detail = f"the request is larger than {self._limit} bytes"
        announced = dict(scope["headers"]).get(b"content-length", b"0")
        if announced.isdigit() and int(announced) > self._limit:
            await self._refuse(413, "capacity", detail)(scope, receive, send)
            return
        received = 0

        async def bounded() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._limit:
                raise HTTPException(413, detail)  # raised inside the app, which answers it
            return message

        await self._app(scope, bounded, send)
