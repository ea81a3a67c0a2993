"""The gateway: when it starts, its sessions, what it reads of a request and how it answers."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from meshrl.config.checks import cross_checks
from meshrl.config.recipe import Recipe
from meshrl.config.stages import eval_spec, train_spec
from meshrl.contract.errors import InfraError, MeshError, UserError, WaitTimeoutError
from meshrl.contract.types import POSTED_REWARD, SamplingParams, Task, Uid
from meshrl.http.gateway.answers import AnswerFormat
from meshrl.http.gateway.app import build_app
from meshrl.http.gateway.models import ChatBody, CompletionBody
from meshrl.http.gateway.responses import ResponsesBody, SaidBefore
from meshrl.http.gateway.serving import gateway_of
from meshrl.http.gateway.sessions import MOST_TOLD, SessionTable, address
from meshrl.rollout.agents.requests import SessionAnswer
from meshrl.rollout.agents.session import AgentSession, SessionRules
from meshrl.rpc.runtime import ServerSettings

from ...chat_model import Scripted, chat_tokenizer

SETTINGS = ServerSettings(metrics_port=None)


@pytest.fixture
async def session(tmp_path: Path) -> AgentSession:
    task = Task(run="run", task_id="t", prompt_ids=np.array([5], dtype=np.int32))
    tokenizer = chat_tokenizer(tmp_path)
    return AgentSession(task, Uid("run", "t", 0), Scripted(tokenizer), tokenizer)


async def test_a_session_that_comes_at_the_deadline_of_a_claim_is_the_callers(
    session: AgentSession,
) -> None:
    table = SessionTable(prompt_tokens=None)
    claiming = asyncio.create_task(table.claim(0.01))
    await asyncio.sleep(0)
    given: list[bool] = []
    asyncio.get_running_loop().call_later(
        0.02, lambda: given.append(table.hand_over(session, address("", session)))
    )
    time.sleep(0.05)  # noqa: ASYNC251 - both timers are due in the same turn of the loop
    assert await claiming is session
    assert given == [True]


async def test_a_claim_past_its_deadline_takes_no_session(session: AgentSession) -> None:
    table = SessionTable(prompt_tokens=None)
    with pytest.raises(WaitTimeoutError, match="no row came"):
        await table.claim(0.01)
    assert not table._claims
    assert not table.hand_over(session, address("", session))


async def test_a_caller_that_leaves_gives_its_session_back(session: AgentSession) -> None:
    table = SessionTable(prompt_tokens=None)
    claiming = asyncio.create_task(table.claim(60))
    await asyncio.sleep(0)
    assert table.hand_over(session, address("", session))
    claiming.cancel()
    await asyncio.gather(claiming, return_exceptions=True)
    assert session.finished.is_set()


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


class Measured(str):
    """Counts how often its length is asked for."""

    asked = 0

    def __len__(self) -> int:
        Measured.asked += 1
        return super().__len__()


class Stars:
    """A tokenizer whose token n is n stars."""

    def decode(self, ids: Sequence[int]) -> str:
        return Measured("*" * sum(ids))


def test_each_token_of_a_completion_says_where_its_text_begins() -> None:
    lengths = [2, 1, 0, 3] * 1000
    answer = SessionAnswer(
        text="",
        tail="",
        tool_calls=(),
        finish_reason="stop",
        prompt_tokens=1,
        tokens=np.array(lengths, dtype=np.int32),
        logprobs=np.zeros(len(lengths), dtype=np.float32),
    )
    form = AnswerFormat(chat=False, model="m", tokenizer=Stars(), logprobs=True)
    not_read: Any = None
    offsets = form.complete(not_read, answer)["choices"][0]["logprobs"]["text_offset"]
    assert offsets[:5] == [0, 2, 3, 3, 6] and len(offsets) == len(lengths)
    assert Measured.asked == len(lengths), "once for each token, however many there are"


MESSAGES = [{"role": "user", "content": "x"}]


def test_fields_that_would_change_the_answer_elsewhere_are_named() -> None:
    body = {"messages": MESSAGES, "min_p": 0.1, "continue_final_message": True, "store": True}
    assert ChatBody.model_validate(body).ignored == ("continue_final_message", "min_p")
    assert CompletionBody.model_validate({"prompt": "x", "guided_json": {}}).ignored == (
        "guided_json",
    )
    plain = {"messages": MESSAGES, "metadata": {"a": "b"}, "top_k": None}
    assert ChatBody.model_validate(plain).ignored == ()


async def test_ignored_fields_are_told_once_whatever_session_sends_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each row is a session of its own."""
    tokenizer = chat_tokenizer(tmp_path)
    sampling = SamplingParams(max_tokens=4)
    task = Task(run="r", task_id="t", prompt_ids=np.zeros(1, np.int32), sampling=sampling)
    sessions = SessionTable(prompt_tokens=None)
    many = tuple(f"guided_{number}" for number in range(100))
    with caplog.at_level(logging.WARNING):
        for index, fields in enumerate(
            (("min_p",), (), ("min_p", "top_k"), ("top_k",), many, many)
        ):
            session = AgentSession(task, Uid("r", "t", index), Scripted(tokenizer), tokenizer)
            sessions.tell_ignored(session, fields)
    told = [record.getMessage().rpartition(": ")[2] for record in caplog.records]
    assert told[:2] == ["min_p", "top_k"]
    assert len(told) == 3 and len(told[2].split(", ")) == MOST_TOLD - 2


SAID = [{"role": "user", "content": "x"}]


@asynccontextmanager
async def called(path: Path, *responses: str | MeshError, **rules: Any) -> AsyncIterator[Any]:
    """The session of an engine that gives these responses, that engine, and a client with the key."""
    tokenizer = chat_tokenizer(path)
    sessions = SessionTable(prompt_tokens=None)
    app = build_app(sessions, tokenizer, max_body_bytes=10_000, identity=None)
    sampling = SamplingParams(max_tokens=40)
    task = Task(run="r", task_id="t", prompt_ids=np.zeros(1, np.int32), sampling=sampling)
    engine = Scripted(tokenizer, *responses)
    session = AgentSession(task, Uid("r", "t", 0), engine, tokenizer, SessionRules(**rules))
    with sessions.opened(session) as address:
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app),
            base_url="http://gateway/v1",
            headers={"Authorization": f"Bearer {address.api_key}"},
        ) as client:
            yield session, engine, client


async def test_a_request_belongs_to_the_conversation_that_its_header_names(tmp_path: Path) -> None:
    async with called(tmp_path, "one", "two", "three", conversations=True) as found:
        session, engine, client = found
        for name in ("a", "b", "a"):
            headers, body = {"X-Session-ID": name}, {"messages": SAID}
            answer = await client.post("/chat/completions", json=body, headers=headers)
            assert answer.is_success
    assert [turn.conversation for turn in session.history.turns] == ["a", "b", "a"]
    session.conversation = "b"
    row = session.rollout().trajectory
    assert row.tokens[row.loss_mask.astype(bool)].tolist() == engine.sampled[1][0]


def test_messages_that_come_with_each_request_are_kept_once() -> None:
    before, none = SaidBefore(), np.zeros(0, dtype=np.int32)
    for turn in range(3):
        told = [{"role": "user", "content": f"{number}"} for number in range(turn + 1)]
        body = ResponsesBody.model_validate({"input": told})
        answer = SessionAnswer(
            text="yes",
            tail="",
            finish_reason="stop",
            prompt_tokens=1,
            tokens=none,
            logprobs=none.astype(np.float32),
        )
        before.keep(f"answer {turn}", body.messages(), answer)
    kept = [before.up_to(f"answer {turn}") for turn in range(3)]
    assert [message["content"] for message in kept[2]] == ["0", "1", "2", "yes"]
    assert len({id(message) for messages in kept for message in messages}) == 4


@pytest.mark.parametrize(
    ("path", "body", "told"),
    [
        ("chat/completions", {"messages": SAID}, '"type":"server_error"'),
        ("completions", {"prompt": "x"}, '"type":"server_error"'),
        ("responses", {"input": "x"}, '{"type":"error","sequence_number":3,"code":"engine_fault",'),
        ("messages", {"messages": SAID, "max_tokens": 9}, '{"type":"error","error":{'),
    ],
)
async def test_a_stream_whose_engine_fails_ends_with_an_error_of_its_dialect(
    path: str, body: dict[str, Any], told: str, tmp_path: Path
) -> None:
    async with called(tmp_path, InfraError("it has gone")) as (_, _, client):
        answer = await client.post(f"/{path}", json={**body, "stream": True})
    last = answer.text.rstrip().rpartition("data: ")[2]
    assert told in last and "it has gone" in last
