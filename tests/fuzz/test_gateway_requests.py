"""Requests that no client would send: the gateway always answers in OpenAI's format, and never with a 5xx."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from ..chat_model import write_chat_model
from ..integration.gateway_mesh import agents_mesh

CALLS = int(os.environ.get("FUZZ_CALLS", "3"))
SEED = int(os.environ.get("FUZZ_SEED", "1"))
ENOUGH = settings(
    max_examples=CALLS,
    deadline=None,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(("role", "content", "name", "x")), inner, max_size=3)
    ),
    max_leaves=6,
)
FIELDS = (
    "messages",
    "prompt",
    "max_tokens",
    "stop",
    "stream",
    "temperature",
    "top_p",
    "n",
    "tools",
    "tool_choice",
    "logprobs",
    "top_logprobs",
    "response_format",
    "logit_bias",
    "stream_options",
)
VALID = st.fixed_dictionaries(
    {"messages": st.just([{"role": "user", "content": "x"}]), "prompt": st.text(max_size=9)}
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("talking")
    write_chat_model(path)
    return path


@pytest.mark.slow
async def test_no_request_breaks_the_gateway(model: Path) -> None:
    import schemathesis  # a second, in each process that collects tests

    options = {"external": True, "max_requests": 1 << 30}
    async with (
        agents_mesh(model, options, sampling={"max_tokens": 40}, deadline_s=300) as mesh,
        httpx.AsyncClient(base_url=mesh.url, timeout=60) as http,
    ):
        claimed = (await http.post("/v1/sessions", json={})).json()
        key = {"Authorization": f"Bearer {claimed['api_key']}"}
        json_key = {**key, "Content-Type": "application/json"}
        document = (await http.get("/openapi.json")).json()
        loop = asyncio.get_running_loop()
        statuses: set[int] = set()

        async def send(method: str, path: str, **arguments: Any) -> None:
            answer = await http.request(method, path, **arguments)
            statuses.add(answer.status_code)
            assert answer.status_code < 500, (method, path, arguments, answer.text)
            if answer.status_code >= 400:
                error = answer.json()["error"]
                of_anthropic = "/messages" in path
                named = {"message", "type"} | (set() if of_anthropic else {"param", "code"})
                assert error.keys() == named
                assert error["message"]

        def sync(method: str, path: str, **arguments: Any) -> None:
            asyncio.run_coroutine_threadsafe(send(method, path, **arguments), loop).result(120)

        def by_schema() -> None:
            for found in schemathesis.openapi.from_dict(document).get_all_operations():
                operation = found.ok()
                if operation.path.endswith(("/finish", "/reward")):
                    continue  # they would end the session that the others need
                if operation.path.startswith("/sessions/"):
                    continue  # the same as under /v1

                @seed(SEED)
                @ENOUGH
                @given(case=operation.as_strategy())
                def one(case: Any) -> None:
                    path = case.path.replace("{session_id}", claimed["id"])
                    for name, value in (case.path_parameters or {}).items():
                        path = path.replace("{" + name + "}", str(value).encode().hex())
                    body = case.body if isinstance(case.body, dict | list) else None
                    if path == "/v1/sessions":
                        body = {"wait_s": 0}
                    sync(case.method, path, json=body, headers=key)

                one()

        def by_hand() -> None:
            @seed(SEED)
            @settings(ENOUGH, max_examples=10 * CALLS)
            @given(
                VALID,
                st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=3),
                st.sampled_from(("chat/completions", "completions", "reward")),
            )
            def one(body: dict[str, Any], change: dict[str, Any], path: str) -> None:
                if path == "reward":
                    change = {**change, "score": change.get("n"), "finish": False}
                sync("POST", f"/v1/{path}", content=encoded(body | change), headers=json_key)

            one()

        await asyncio.to_thread(by_schema)
        await asyncio.to_thread(by_hand)
        for content in (
            b"[" * 20_000,
            b'{"messages":' + b"[" * 900 + b"]" * 900 + b"}",
            b"\xff\xfe",
        ):
            await send("POST", "/v1/chat/completions", content=content, headers=json_key)
        assert {200, 400} <= statuses <= {200, 400, 401, 403, 404, 405, 408, 413, 429}, statuses
        answered = await http.post("/v1/completions", json={"prompt": "x"}, headers=key)
        assert answered.status_code == 200


def encoded(body: Any) -> bytes:
    return json.dumps(body).encode(errors="surrogatepass")
