"""The routes of a vLLM server that the mesh uses, and what their failures mean here."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from meshrl.contract.errors import InfraError, UnavailableError, UserError
from meshrl.contract.nouns import OnUpdate, Version

GENERATE = "/inference/v1/generate"
ID_PREFIX = "generate-tokens-"
"""vLLM puts it before the ids of token-in/token-out requests."""
CONNECT_S = 10.0
PAUSE = {
    OnUpdate.DRAIN: {"mode": "wait", "clear_cache": "true"},
    OnUpdate.INTERRUPT: {"mode": "keep", "clear_cache": "true"},
    OnUpdate.IN_FLIGHT: {"mode": "keep", "clear_cache": "false"},
}
"""`keep` with `clear_cache` preempts what runs: its cache is computed anew under the weights it resumes with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """What one event of a generate stream carries."""

    tokens: Sequence[int]
    logprobs: Sequence[float]
    finish_reason: str
    """Empty while running."""
    spans: Sequence[tuple[str, int, int]] | None
    """With the last chunk: (label, start, end) over the whole response, as the engine stamped its steps."""


class Client:
    """Speaks to the server at `url`."""

    def __init__(self, url: str, *, silence_s: float, update_s: float) -> None:
        """Deadlines: `silence_s` between two chunks of a stream, `update_s` for each control call."""
        key = os.environ.get("VLLM_API_KEY")  # the name by which the server itself reads it
        self.url = url.rstrip("/")
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

    async def healthy(self, wait_s: float = CONNECT_S) -> bool:
        """Whether server and engine answer within `wait_s`."""
        try:
            response = await self._http.get("/health", timeout=wait_s)
        except httpx.HTTPError:
            return False
        return response.is_success

    async def label(self) -> str:
        """The version's label that the engine stamps on tokens now. Raises what `call` does."""
        return str((await self.call("GET", "/weight_info"))["weight_version"])

    async def call(self, method: str, route: str, **content: Any) -> Mapping[str, Any]:
        """One control call, to its end.

        Raises:
            UserError: the server does not offer it, or was started without what it needs.
            UnavailableError: nobody answers.
            InfraError: it failed.
        """
        try:
            response = await self._http.request(method, route, timeout=self._timeout(), **content)
        except httpx.ConnectError as error:
            raise UnavailableError(f"no vLLM server answers at {self.url}: {error}") from error
        except httpx.HTTPError as error:
            raise InfraError(f"vLLM at {self.url}, {route}: {_said(error)}") from error
        if response.status_code == httpx.codes.NOT_FOUND:
            raise UserError(f"vLLM at {self.url} has no route {route}")
        if not response.is_success:
            raise InfraError(f"vLLM at {self.url}, {route}: {_message(response.content)}")
        answer = response.json() if response.content else {}
        return answer if isinstance(answer, dict) else {}

    async def load(self, directory: str, version: Version, on_update: OnUpdate) -> None:
        """Pause, replace the weights by those in `directory`, label them, resume.

        Raises:
            MeshError: at any point; the engine must then be taken for half loaded.
        """
        await self.call("POST", "/pause", params=PAUSE[on_update])
        await self.call("POST", "/start_weight_update")
        await self.call("POST", "/update_weights", json={"update_info": {"path": directory}})
        await self.call("POST", "/finish_weight_update", json={"weight_version": str(version)})
        label = await self.label()
        if label != str(version):
            raise InfraError(f"vLLM at {self.url} says its weights are {label!r}, not {version}")
        await self.call("POST", "/resume")

    async def generate(self, body: Mapping[str, Any]) -> AsyncGenerator[Chunk, None]:
        """Stream one response. Closing the iterator closes the connection, which aborts the request.

        Raises:
            UserError: the server refuses the request.
            InfraError: the server failed, went away or kept silent.
        """
        try:
            async with self._http.stream(
                "POST", GENERATE, json={**body, "stream": True}, timeout=self._timeout(stream=True)
            ) as response:
                if not response.is_success:
                    message = _message(await response.aread())
                    kind = UserError if response.is_client_error else InfraError
                    raise kind(f"vLLM at {self.url}: {message}")
                async for line in response.aiter_lines():
                    text = line.removeprefix("data: ")
                    if text and text != "[DONE]":
                        yield _chunk(json.loads(text))
        except httpx.HTTPError as error:
            raise InfraError(f"vLLM at {self.url} broke a response off: {_said(error)}") from error

    async def abort(self, request_id: str) -> None:
        """End a request; its stream gets a last chunk."""
        route = "/inference/v1/abort_requests"
        await self.call("POST", route, json={"request_ids": [ID_PREFIX + request_id]})

    def _timeout(self, *, stream: bool = False) -> httpx.Timeout:
        return httpx.Timeout(self._silence_s if stream else self._update_s, connect=CONNECT_S)


def _chunk(event: Mapping[str, Any]) -> Chunk:
    if "choices" not in event:
        raise InfraError(f"vLLM failed a request: {_message_of(event)}")
    (choice,) = event["choices"]
    content = (choice["logprobs"] or {}).get("content") or []
    spans = choice.get("weight_versions")
    tokens = choice["token_ids"] or []
    if len(content) != len(tokens):
        raise InfraError(f"vLLM gave {len(content)} log-probs for {len(tokens)} tokens")
    return Chunk(
        tokens=tokens,
        logprobs=[entry["logprob"] for entry in content],
        finish_reason=choice["finish_reason"] or "",
        spans=None
        if spans is None
        else [(span["version"], span["start"], span["end"]) for span in spans],
    )


def _message(content: bytes) -> str:
    """What an error answer says, in one line."""
    try:
        return _message_of(json.loads(content))
    except ValueError:
        return content.decode(errors="replace").strip()[:300] or "no reason given"


def _message_of(answer: Any) -> str:
    error = (
        answer.get("error", answer.get("detail", answer)) if isinstance(answer, dict) else answer
    )
    message = error.get("message", error) if isinstance(error, dict) else error
    return str(message).strip()


def _said(error: httpx.HTTPError) -> str:
    """Time-outs of httpx have no text of their own."""
    return str(error) or type(error).__name__
