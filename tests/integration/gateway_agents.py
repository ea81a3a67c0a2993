"""Agents for the gateway's tests, named by their dotted path, an echo engine, and claims of external agents."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
from openai import AsyncOpenAI, OpenAI

from meshrl.contract.types import OnUpdate, WeightManifest
from meshrl.testing.engines.echo import Behaviour
from meshrl.testing.engines.echo import build as build_echo

from .gateway_mesh import FIRST, RUN, Mesh

AGENT = Path(__file__).parent / "command_agent.py"
leaders: list[Callable[..., Awaitable[Any]]] = []
"""Behaviours of the agent below: it follows the last entry."""


async def agent(base_url: str, api_key: str, task: Any) -> Any:
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        return await leaders[-1](client, task)


def leading(what: Callable[..., Awaitable[Any]]) -> dict[str, Any]:
    """Options for an agent that does `what`."""
    leaders.append(what)
    return {"function": f"{__name__}.agent"}


def blocking_agent(base_url: str, api_key: str, task: Any) -> float:
    with OpenAI(base_url=base_url, api_key=api_key) as client:
        answer = client.chat.completions.create(
            model="gpt-4o", messages=[{"role": "user", "content": task["prompt"]}], max_tokens=5
        )
    assert answer.usage is not None and answer.usage.completion_tokens <= 5
    return 0.25


BLOCKING = {"function": f"{__name__}.blocking_agent"}


@asynccontextmanager
async def echoing(model: Path, behaviour: Behaviour) -> AsyncIterator[Any]:
    """An echo engine that serves the first version and behaves as configured."""
    engine = build_echo({"tokens_per_s": 10_000, "tokens_per_delta": 2}, model=model, slots=8)
    await engine.start()
    manifest = WeightManifest(run=RUN, version=FIRST, tensors=(), bucket_bytes=(), bucket_hashes=())
    await engine.stage_weights(manifest, [])
    await engine.commit_weights(FIRST, OnUpdate.DRAIN)
    engine.behave(behaviour)
    yield engine
    await engine.close()


async def claim(mesh: Mesh, http: httpx.AsyncClient, **headers: str) -> httpx.Response:
    return await http.post(f"{mesh.url}/v1/sessions", json={"wait_s": 30}, headers=headers)
