"""Turns away who has no session's key before a byte of the body is read."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from meshrl.contract.errors import UnauthenticatedError
from meshrl.http.gateway.errors import refused
from meshrl.http.gateway.sessions import SessionTable
from meshrl.rollout.sessions.requests import SessionEndedError

GUARDED = ("/v1/", "/sessions/")
CLAIMS = "/v1/sessions"
"""Whoever claims a session has no key of one yet."""


class SessionAuth:
    """ASGI middleware."""

    def __init__(self, app: ASGIApp, book: SessionTable) -> None:
        self._app = app
        self._book = book

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] == "http" and _is_guarded(scope["path"]):
            authorization = dict(scope["headers"]).get(b"authorization", b"").decode("latin-1")
            try:
                self._book.find(authorization)
            except UnauthenticatedError as error:
                await refused(error)(scope, receive, send)
                return
            except SessionEndedError:
                pass  # the route tells, or finds that the same was said before
        await self._app(scope, receive, send)


def _is_guarded(path: str) -> bool:
    return path.startswith(GUARDED) and path.rstrip("/") != CLAIMS
