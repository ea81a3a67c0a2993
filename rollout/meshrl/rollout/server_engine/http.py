"""HTTP calls and event streams to an engine server; their failures become errors of the mesh."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping
from typing import Any

import httpx

from meshrl.common.sockets import has_secret, keep_secret
from meshrl.contract.errors import InfraError, UnauthenticatedError, UnavailableError, UserError

CONNECT_S = 10.0


class HttpClient:
    """Calls the server at `url`; messages call it `name`."""

    def __init__(
        self, name: str, url: str, *, key: str | None, silence_s: float, update_s: float
    ) -> None:
        """Deadlines: `silence_s` between two lines of a stream, `update_s` for each call. `key`: a bearer token.

        Raises:
            UserError: the key would travel unencrypted to another machine, and the network is not trusted.
        """
        self.url = url.rstrip("/")
        if key or has_secret(url):
            keep_secret(self.url, f"the key of {name}")
        self.who = f"{name} at {self.url}"
        """For messages."""
        self._silence_s = silence_s
        self._update_s = update_s
        self._http = httpx.AsyncClient(
            base_url=self.url,
            headers={"Authorization": f"Bearer {key}"} if key else {},
            # No reuse: the server closes idle connections, and a request on a connection that is being closed fails.
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
            trust_env=False,
        )

    async def close(self) -> None:
        """Free the connections."""
        await self._http.aclose()

    async def healthy(self, wait_s: float) -> bool:
        """Whether `/health` answers with success within `wait_s` seconds."""
        try:
            response = await self._http.get("/health", timeout=wait_s)
        except httpx.HTTPError:
            return False
        return response.is_success

    async def call(
        self, method: str, route: str, *, wait_s: float | None = None, **content: Any
    ) -> Mapping[str, Any]:
        """One call; waits for the whole answer. Answers that are no JSON object come back as {}.

        Raises:
            UserError: the server has no such route.
            UnauthenticatedError: it asks for another key.
            UnavailableError: nothing listens there.
            InfraError: the call failed.
        """
        timeout = httpx.Timeout(
            wait_s or self._update_s, connect=min(CONNECT_S, wait_s or CONNECT_S)
        )
        try:
            response = await self._http.request(method, route, timeout=timeout, **content)
        except httpx.ConnectError as error:
            raise UnavailableError(f"no {self.who} answers: {error}") from error
        except httpx.HTTPError as error:
            raise InfraError(f"{self.who}, {route}: {_text(error)}") from error
        if response.status_code == httpx.codes.UNAUTHORIZED:
            raise UnauthenticatedError(f"{self.who} asks for a key")
        if response.status_code == httpx.codes.NOT_FOUND:
            raise UserError(f"{self.who} has no route {route}")
        if not response.is_success:
            raise InfraError(f"{self.who}, {route}: {_message(response.content)}")
        try:
            answer = response.json()
        except ValueError:
            return {}
        return answer if isinstance(answer, dict) else {}

    async def text(self, route: str, *, wait_s: float) -> str:
        """The body of a GET of `route`; empty where the server has no such route or misses the deadline."""
        try:
            response = await self._http.get(route, timeout=wait_s)
        except httpx.HTTPError:
            return ""
        return response.text if response.is_success else ""

    async def stream(
        self, route: str, body: Mapping[str, Any]
    ) -> AsyncGenerator[Mapping[str, Any], None]:
        """Post `body`, yield the server-sent events. Closing the iterator closes the connection.

        An error may be the status of the answer, or an event of a stream that began with status 200.

        Raises:
            UserError: the server refuses the request.
            UnauthenticatedError: it asks for another key.
            InfraError: the server failed, disconnected or sent nothing for `silence_s`.
        """
        timeout = httpx.Timeout(self._silence_s, connect=CONNECT_S)
        try:
            async with self._http.stream("POST", route, json=body, timeout=timeout) as response:
                if response.status_code == httpx.codes.UNAUTHORIZED:
                    raise UnauthenticatedError(f"{self.who} asks for a key")
                if not response.is_success:
                    message = _message(await response.aread())
                    kind = UserError if _is_refusal(response.status_code) else InfraError
                    raise kind(f"{self.who}: {message}")
                async for line in response.aiter_lines():
                    text = line.removeprefix("data: ")
                    if not text or text == "[DONE]":
                        continue
                    event = json.loads(text)
                    if error := event.get("error"):
                        code = error.get("code") if isinstance(error, dict) else None
                        kind = UserError if _is_refusal(code) else InfraError
                        raise kind(f"{self.who}: {error_message(event)}")
                    yield event
        except httpx.HTTPError as error:
            raise InfraError(f"{self.who} broke off a response: {_text(error)}") from error


def _is_refusal(code: object) -> bool:
    """A status that blames the request; a server that is too busy or too slow blames itself."""
    return (
        isinstance(code, int)
        and httpx.codes.is_client_error(code)
        and code not in (httpx.codes.REQUEST_TIMEOUT, httpx.codes.TOO_MANY_REQUESTS)
    )


def error_message(answer: Any) -> str:
    """The message in the JSON of an error answer."""
    error = (
        answer.get("error", answer.get("detail", answer)) if isinstance(answer, dict) else answer
    )
    message = error.get("message", error) if isinstance(error, dict) else error
    return " ".join(str(message).split())


def _message(content: bytes) -> str:
    """The message of an error answer, in one line."""
    try:
        return error_message(json.loads(content))
    except ValueError:
        return " ".join(content.decode(errors="replace").split())[:300] or "no reason given"


def _text(error: httpx.HTTPError) -> str:
    """The message of `error`, or its type: httpx time-outs have no message."""
    return str(error) or type(error).__name__
