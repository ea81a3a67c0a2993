"""When a worker starts a gateway, where, and for whom."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from meshrl.config.checks import cross_checks
from meshrl.config.recipe import Recipe
from meshrl.config.stages import eval_spec, train_spec
from meshrl.contract.errors import UserError
from meshrl.contract.types import POSTED_REWARD
from meshrl.http.gateway.serving import gateway_of
from meshrl.rpc.runtime import ServerSettings

from ...chat_model import chat_tokenizer

SETTINGS = ServerSettings(metrics_port=None)


def recipe(path: Path, options: dict[str, Any], **gateway: Any) -> Recipe:
    rollout = {"program": "openai", "program_options": options, "gateway": gateway}
    return Recipe.model_validate(
        {"run": {"name": "r", "dir": path / "run"}, "model": {"path": path}, "rollout": rollout}
    )


async def test_a_gateway_writes_its_address_while_it_serves(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer(tmp_path)
    wanted = recipe(tmp_path, {"external": True})
    async with gateway_of(wanted, tokenizer, SETTINGS, name="rollout-1") as sessions:
        assert sessions is not None
        (file,) = (tmp_path / "run" / "gateways").iterdir()
        assert json.loads(file.read_text())["url"] == sessions.url
        async with httpx.AsyncClient(base_url=sessions.url, timeout=60) as http:
            assert (await http.get("/health")).json() == {"status": "serving", "sessions": 0}
            document = (await http.get("/openapi.json")).json()
            assert "/sessions/{session_id}/v1/chat/completions" in document["paths"]
            kind = {"content-type": "application/json"}
            answer = await http.post("/v1/chat/completions", content=b"x" * 100_000, headers=kind)
            assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
    assert not file.exists()


async def test_a_program_without_agents_has_no_gateway(tmp_path: Path) -> None:
    plain = Recipe.model_validate({"run": {"name": "r"}, "model": {"path": tmp_path}})
    async with gateway_of(plain, None, SETTINGS, name="w") as sessions:  # type: ignore[arg-type]
        assert sessions is None
    assert all(POSTED_REWARD not in stage.writes for stage in train_spec(plain).stages)


def test_runs_of_agents_have_a_column_for_posted_rewards(tmp_path: Path) -> None:
    wanted = recipe(tmp_path, {"external": True})
    for spec in (train_spec(wanted), eval_spec(wanted)):
        rollout, reward, *_ = spec.stages
        assert POSTED_REWARD in rollout.writes
        assert POSTED_REWARD in reward.reads


@pytest.mark.parametrize(
    ("options", "gateway", "problem"),
    [
        ({"external": True}, {"host": "0.0.0.0"}, "anybody could claim sessions"),
        ({"command": ["true"]}, {"host": "0.0.0.0"}, "the agents of this run are started here"),
    ],
)
async def test_a_gateway_that_everybody_could_reach_is_refused(
    tmp_path: Path, options: dict[str, Any], gateway: dict[str, Any], problem: str
) -> None:
    opening = gateway_of(recipe(tmp_path, options, **gateway), None, SETTINGS, name="w")  # type: ignore[arg-type]
    with pytest.raises(UserError, match=problem):
        async with opening:
            pass


async def test_a_gateway_takes_no_tokens_unencrypted_beyond_this_machine(tmp_path: Path) -> None:
    wanted = recipe(tmp_path, {"external": True}, host="0.0.0.0", tokens=str(tmp_path / "tokens"))
    opening = gateway_of(wanted, None, SETTINGS, name="w")  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"would travel unencrypted: set tls\.cert"):
        async with opening:
            pass


async def test_a_gateway_without_protection_gives_out_no_sessions(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer(tmp_path)
    settings = ServerSettings(metrics_port=None, allow_insecure_bind=True)
    wanted = recipe(tmp_path, {"external": True}, host="0.0.0.0")
    async with gateway_of(wanted, tokenizer, settings, name="w") as sessions:
        assert sessions is not None
        async with httpx.AsyncClient(timeout=60) as http:
            local = sessions.url.replace("0.0.0.0", "127.0.0.1")
            assert (await http.post(f"{local}/v1/sessions", json={})).status_code == 403


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({}, "want exactly one of function, command and external"),
        ({"function": "no_such_package.agent"}, "no module 'no_such_package' can be imported"),
        ({"function": "no/such/agent.py:solve"}, "no such file: no/such/agent.py"),
        ({"command": ["no-such-program"]}, "no program 'no-such-program' here"),
        ({"external": True, "branches": "all"}, "did you mean 'branch'"),
    ],
)
def test_a_wrong_agent_in_a_recipe_is_reported(
    tmp_path: Path, options: dict[str, Any], problem: str
) -> None:
    found = [text for _, text in cross_checks(recipe(tmp_path, options))]
    assert any(problem in text for text in found), found
