"""Calls and streams over HTTP, and what their failures mean here."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping
from typing import Any

import httpx

from meshrl.contract.errors import InfraError, UnavailableError, UserError

CONNECT_S = 10.0


class Http:
    """Speaks to the server at `url`; `name` is what errors call it."""

    def __init__(
        self, name: str, url: str, *, key: str | None, silence_s: float, update_s: float
    ) -> None:
        """Deadlines: `silence_s` between two lines of a stream, `update_s` for each call. `key`: a bearer token."""
        self.url = url.rstrip("/")
        self.who = f"{name} at {self.url}"
        """In errors."""
        self._silence_s = silence_s
        self._update_s = update_s
        self._http = httpx.AsyncClient(
            base_url=self.url,
            headers={"Authorization": f"Bearer {key}"} if key else {},
            # The server closes idle connections; one that it closes while it is being reused fails a request.
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
            trust_env=False,
        )

    async def close(self) -> None:
        """Free the connections."""
        await self._http.aclose()

    async def healthy(self, wait_s: float) -> bool:
        """Whether `/health` is answered well within `wait_s`."""
        try:
            response = await self._http.get("/health", timeout=wait_s)
        except httpx.HTTPError:
            return False
        return response.is_success

    async def call(
        self, method: str, route: str, *, wait_s: float | None = None, **content: Any
    ) -> Mapping[str, Any]:
        """One call, to its end. Answers that are no JSON object come back as {}.

        Raises:
            UserError: the server does not offer it.
            UnavailableError: nobody answers.
            InfraError: it failed.
        """
        timeout = httpx.Timeout(
            wait_s or self._update_s, connect=min(CONNECT_S, wait_s or CONNECT_S)
        )
        try:
            response = await self._http.request(method, route, timeout=timeout, **content)
        except httpx.ConnectError as error:
            raise UnavailableError(f"no {self.who} answers: {error}") from error
        except httpx.HTTPError as error:
            raise InfraError(f"{self.who}, {route}: {_said(error)}") from error
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
        """What a GET of `route` answers; empty where the server does not offer it, or does not answer in time."""
        try:
            response = await self._http.get(route, timeout=wait_s)
        except httpx.HTTPError:
            return ""
        return response.text if response.is_success else ""

    async def stream(
        self, route: str, body: Mapping[str, Any]
    ) -> AsyncGenerator[Mapping[str, Any], None]:
        """Post `body`, yield the events of the answer. Closing the iterator closes the connection.

        Raises:
            UserError: the server refuses the request.
            InfraError: the server failed, went away or kept silent.
        """
        timeout = httpx.Timeout(self._silence_s, connect=CONNECT_S)
        try:
            async with self._http.stream("POST", route, json=body, timeout=timeout) as response:
                if not response.is_success:
                    message = _message(await response.aread())
                    kind = UserError if response.is_client_error else InfraError
                    raise kind(f"{self.who}: {message}")
                async for line in response.aiter_lines():
                    text = line.removeprefix("data: ")
                    if text and text != "[DONE]":
                        yield json.loads(text)
        except httpx.HTTPError as error:
            raise InfraError(f"{self.who} broke a response off: {_said(error)}") from error


def message_of(answer: Any) -> str:
    """What the JSON of an error answer says."""
    error = (
        answer.get("error", answer.get("detail", answer)) if isinstance(answer, dict) else answer
    )
    message = error.get("message", error) if isinstance(error, dict) else error
    return " ".join(str(message).split())


def _message(content: bytes) -> str:
    """What an error answer says, in one line."""
    try:
        return message_of(json.loads(content))
    except ValueError:
        return " ".join(content.decode(errors="replace").split())[:300] or "no reason given"


def _said(error: httpx.HTTPError) -> str:
    """Time-outs of httpx have no text of their own."""
    return str(error) or type(error).__name__
