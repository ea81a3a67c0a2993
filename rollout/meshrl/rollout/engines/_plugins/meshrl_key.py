"""Asks every caller of a vLLM server for its key: `--middleware meshrl_key.Asks`, with the key in VLLM_API_KEY.

vLLM itself asks for that key on `/v1` and `/inference` only, not on the routes that change weights.
This file runs inside vLLM's own environment, where meshrl is not installed.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, TypeAlias

Scope: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Scope]]
Send: TypeAlias = Callable[[Scope], Awaitable[None]]

HEALTH = "/health"
"""Says only that the server runs."""


class Asks:
    """ASGI middleware: any request but one for HEALTH needs `Authorization: Bearer KEY`."""

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        """Raises KeyError without a key in the environment: the server does not start."""
        self._app = app
        self._wanted = b"Bearer " + os.environ["VLLM_API_KEY"].encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer 401."""
        if scope["type"] == "lifespan" or scope["path"] == HEALTH or self._knows_key(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            headers = [(b"content-type", b"application/json"), (b"www-authenticate", b"Bearer")]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": b'{"error": "wants the key"}'})

    def _knows_key(self, scope: Scope) -> bool:
        given = [value for name, value in scope["headers"] if name.lower() == b"authorization"]
        return len(given) == 1 and hmac.compare_digest(given[0], self._wanted)
