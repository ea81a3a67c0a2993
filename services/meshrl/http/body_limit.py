"""Limits the body of every request, with and without a Content-Length, and the time that it may take to come."""

from __future__ import annotations

import asyncio

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from meshrl.rpc.web_origin import Refuse

BODY_S = 60.0
"""Seconds for a whole body."""


class BodyLimit:
    """ASGI middleware: 413 beyond `limit` bytes, announced or sent, 408 after `body_s`; `refuse` answers."""

    def __init__(self, app: ASGIApp, limit: int, refuse: Refuse, body_s: float = BODY_S) -> None:
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
        announced = dict(scope["headers"]).get(b"content-length", b"0")
        if announced.isdigit() and int(announced) > self._limit:
            await self._refuse(413, "capacity", detail)(scope, receive, send)
            return
        received = 0
        deadline: float | None = asyncio.get_running_loop().time() + self._body_s

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
            return message

        await self._app(scope, bounded, send)
