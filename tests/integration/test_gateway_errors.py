"""Requests that the gateway refuses, with the errors of OpenAI's API."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI

from meshrl.contract.errors import ConfigError
from meshrl.rollout.programs import ProgramCache

from .gateway_agents import leading
from .gateway_mesh import Mesh, agents_mesh

CHAT: Any = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
Found = tuple[int, str | None]
"""A status, and the parameter or else the code that the error names."""


async def refusal(http: httpx.AsyncClient, url: str, **request: Any) -> Found:
    answer = await http.post(url, **request)
    error = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return answer.status_code, error["param"] or error["code"]


async def completes(mesh: Mesh) -> None:
    """The only row is sampled; if the agent failed, it would be dead-lettered."""
    waiting, dead = asyncio.create_task(mesh.rows(1)), asyncio.create_task(mesh.dead())
    done, _ = await asyncio.wait({waiting, dead}, return_when=asyncio.FIRST_COMPLETED)
    assert waiting in done, dead.result()
    dead.cancel()


async def refusals(model: Path, requests: Mapping[str, Mapping[str, Any]]) -> dict[str, Found]:
    """The answers of one session to each of `requests` in turn; an ordinary one is answered afterwards."""
    found: dict[str, Found] = {}

    async def misuse(client: AsyncOpenAI, task: Any) -> None:
        async with httpx.AsyncClient(timeout=60) as http:
            for name, body in requests.items():
                request = dict(body)
                url = f"{client.base_url}{request.pop('path', 'chat/completions')}"
                key = {"Authorization": f"Bearer {client.api_key}"}
                headers = {**key, **request.pop("headers", {})}
                found[name] = await refusal(http, url, headers=headers, **request)
        await client.chat.completions.create(**CHAT, max_tokens=3, temperature=0.3, seed=4)

    async with agents_mesh(model, leading(misuse), max_attempts=1) as mesh:
        await completes(mesh)
    return found


async def test_a_session_accepts_only_its_own_key(talking_model: Path) -> None:
    found: dict[str, Found] = {}

    async def intrude(client: AsyncOpenAI, task: Any) -> None:
        mine = f"{client.base_url}chat/completions"
        sessions = str(client.base_url).rsplit("/", 3)[0]
        key = {"Authorization": f"Bearer {client.api_key}"}
        guessed = {"Authorization": "Bearer mrs_guess"}
        async with httpx.AsyncClient(timeout=60) as http:
            found["no key"] = await refusal(http, mine, json=CHAT)
            found["wrong key"] = await refusal(http, mine, json=CHAT, headers=guessed)
            other = f"{sessions}/other/v1/chat/completions"
            found["other session"] = await refusal(http, other, json=CHAT, headers=key)
            claims = f"{sessions.removesuffix('/sessions')}/v1/sessions"
            found["claim"] = await refusal(http, claims, json={}, headers=key)
        with pytest.raises(openai.AuthenticationError):
            await client.with_options(api_key="mrs_other").models.list()
        await client.chat.completions.create(**CHAT, max_tokens=3)

    async with agents_mesh(talking_model, leading(intrude), max_attempts=1) as mesh:
        await completes(mesh)
    assert found == {
        "no key": (401, "invalid_api_key"),
        "wrong key": (401, "invalid_api_key"),
        "other session": (403, "wrong_session"),
        "claim": (403, "wrong_session"),
    }


async def test_an_unsupported_option_is_refused_by_its_parameter(talking_model: Path) -> None:
    chats: dict[str, Any] = {
        "n": {"n": 2},
        "bias": {"logit_bias": {"5": 1}},
        "penalty": {"frequency_penalty": 0.5},
        "prompt": {"prompt_logprobs": 21},
        "top_logprobs": {"logprobs": True, "top_logprobs": 3},
        "json mode": {"response_format": {"type": "json_object"}},
        "tool_choice": {"tools": [TOOL], "tool_choice": "required"},
        "image": {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
    }
    completions: dict[str, Any] = {
        "two prompts": {"prompt": ["x", "y"]},
        "echo": {"prompt": "x", "echo": True, "stream": True},
        "streamed": {"prompt": "x", "prompt_logprobs": 0, "stream": True},
        "long": {"prompt": "x" * 1000},
    }
    requests: dict[str, Any] = {name: {"json": CHAT | more} for name, more in chats.items()}
    for name, body in completions.items():
        requests[name] = {"path": "completions", "json": body}
    assert await refusals(talking_model, requests) == {
        "n": (400, "n"),
        "bias": (400, "logit_bias"),
        "penalty": (400, "frequency_penalty"),
        "prompt": (400, "prompt_logprobs"),
        "top_logprobs": (400, "top_logprobs"),
        "json mode": (400, "response_format"),
        "tool_choice": (400, "tool_choice"),
        "image": (400, "messages.0.content.str"),
        "two prompts": (400, "prompt"),
        "echo": (400, "echo"),
        "streamed": (400, "prompt_logprobs"),
        "long": (400, "context_length_exceeded"),
    }


async def test_an_invalid_field_is_refused_by_its_place(talking_model: Path) -> None:
    as_json = {"Content-Type": "application/json"}
    surrogate = b'{"messages":[{"role":"user","content":"\\ud800"}]}'
    requests: dict[str, Any] = {
        "no messages": {"json": {"messages": []}},
        "role": {"json": {"messages": [{"role": "king", "content": "x"}]}},
        "surrogate": {"content": surrogate, "headers": as_json},
        "not JSON": {"content": b"{", "headers": as_json},
        "large": {"json": {**CHAT, "user": "x" * 300_000}},
        "empty": {"path": "completions", "json": {"prompt": ""}},
        "token": {"path": "completions", "json": {"prompt": [1 << 30]}},
        "reward": {"path": "reward", "json": {"score": "much"}},
        "nowhere": {"path": "images/generations", "json": {}},
    }
    assert await refusals(talking_model, requests) == {
        "no messages": (400, "messages"),
        "role": (400, "messages.0.role"),
        "surrogate": (400, "messages"),
        "not JSON": (400, "1"),
        "large": (413, "too_large"),
        "empty": (400, None),
        "token": (400, None),
        "reward": (400, "score"),
        "nowhere": (404, "not_found"),
    }


async def test_the_official_client_raises_its_own_error(talking_model: Path) -> None:
    async def ask_for_three(client: AsyncOpenAI, task: Any) -> None:
        with pytest.raises(openai.BadRequestError, match="n must be 1"):
            await client.chat.completions.create(**CHAT, n=3)
        await client.chat.completions.create(**CHAT, max_tokens=3)

    async with agents_mesh(talking_model, leading(ask_for_three), max_attempts=1) as mesh:
        await completes(mesh)


def test_invalid_options_are_refused_at_start() -> None:
    def wrong(options: dict[str, Any], **more: Any) -> str:
        with pytest.raises(ConfigError) as caught:
            ProgramCache("openai", options, **more).get("openai")
        return str(caught.value)

    sessions: Any = object()
    assert "want exactly one of function, command and external, got none" in wrong(
        {}, gateway=sessions
    )
    assert "got function and external" in wrong(
        {"function": "a.b", "external": True}, gateway=sessions
    )
    assert "needs a gateway" in wrong({"external": True})
