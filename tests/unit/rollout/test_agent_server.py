"""One process for all conversations of a worker: its answers, its faults, and no wait without an end."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from meshrl.config.machine import ThisMachine
from meshrl.contract.errors import ConfigError
from meshrl.contract.types import PostedReward
from meshrl.rollout.agents import agent as agents
from meshrl.rollout.agents.agent import AgentError, Led
from meshrl.rollout.agents.agent_server import AgentServer
from meshrl.rollout.agents.session import Address
from meshrl.rollout.programs import verifiers

from . import some_tools

COMMAND = [sys.executable, str(Path(__file__).with_name("line_server.py"))]
ADDRESS = Address(base_url="http://127.0.0.1:1/v1", api_key="k")


@pytest.fixture
async def server() -> AsyncIterator[AgentServer]:
    made = AgentServer(COMMAND, env={}, cancel_timeout_s=60)
    yield made
    await made.aclose()


async def lead(server: AgentServer, do: Any) -> PostedReward | None:
    return (await led(server, do)).reward


async def led(server: AgentServer, do: Any) -> Led:
    async with asyncio.timeout(60):
        return await server({"do": do}, ADDRESS)


async def test_conversations_run_at_the_same_time_in_one_process(server: AgentServer) -> None:
    await server.start()
    rewards = await asyncio.gather(*(lead(server, n / 4) for n in range(1, 4)))
    assert [reward and reward.score for reward in rewards] == [0.25, 0.5, 0.75]
    assert len({reward.components["pid"] for reward in rewards if reward}) == 1
    assert await lead(server, None) is None


@pytest.mark.parametrize(
    ("do", "says"),
    [
        ("fail", "the maze fell over"),
        ("die", "ended with 7: out of luck"),
        ("long", "the answer has 2[0-9]{6} bytes, more than 1048576"),
        ("words", "a reward's score is 'much', want a finite number"),
    ],
)
async def test_a_fault_has_its_reason_and_the_next_conversation_works(
    server: AgentServer, do: str, says: str
) -> None:
    with pytest.raises(AgentError, match=says):
        await lead(server, do)
    reward = await lead(server, 1.0)
    assert reward and reward.score == 1.0


async def test_the_end_of_the_process_fails_all_that_wait(server: AgentServer) -> None:
    waiting = asyncio.create_task(lead(server, "hang"))
    await lead(server, 1.0)  # the other one is there by now
    with pytest.raises(AgentError, match="out of luck"):
        await lead(server, "die")
    with pytest.raises(AgentError, match="out of luck"):
        await waiting


async def cancelled(server: AgentServer, do: str) -> None:
    """A conversation whose row's deadline passes."""
    call = asyncio.create_task(lead(server, do))
    await asyncio.sleep(0.2)  # it is there by then, or is told of its end as soon as it comes
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call


async def test_a_conversation_that_hangs_ends_with_its_row_and_the_process_stays(
    server: AgentServer,
) -> None:
    before = await lead(server, 1.0)
    await cancelled(server, "hang")
    after = await lead(server, 1.0)
    assert before and after and before.components == after.components


async def test_a_process_that_hangs_is_replaced() -> None:
    server = AgentServer(COMMAND, env={}, cancel_timeout_s=0.3)
    before = await lead(server, 1.0)
    await cancelled(server, "block")
    # It had not been replaced yet.
    with pytest.raises(
        AgentError, match=r"was killed: it does not answer 0\.3 s after a conversation"
    ):
        await lead(server, 1.0)
    after = await lead(server, 1.0)
    assert before and after and before.components != after.components
    await server.aclose()


@pytest.mark.parametrize(
    ("argument", "says"),
    [
        ("late", r"was not ready after 0\.5 s"),
        ("broken", "ended with 1: no such taskset"),
    ],
)
async def test_a_server_that_does_not_start_is_the_recipe_s_fault(argument: str, says: str) -> None:
    server = AgentServer(
        [*COMMAND, argument], env={}, start_timeout_s=0.5 if argument == "late" else 60
    )
    with pytest.raises(ConfigError, match=says):
        await server.start()
    await server.aclose()


async def test_functions_that_never_return_are_not_started_without_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(agents, "MOST_LOST", 2)
    some_tools.hanging.clear()
    agent = agents.FunctionAgent("tests.unit.rollout.some_tools.hanging_agent")
    for _ in range(2):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(agent({}, ADDRESS), 0.05)
    with pytest.raises(AgentError, match="2 calls never returned"):
        await agent({}, ADDRESS)
    some_tools.hanging.set()  # they come back after all
    async with asyncio.timeout(60):
        while True:
            try:
                assert (await agent({}, ADDRESS)).reward == PostedReward(score=0.5)
                break
            except AgentError:
                await asyncio.sleep(0.01)


def test_agents_reach_their_gateway_past_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    env = {"http_proxy": "http://proxy:3128"}
    for agent in (AgentServer(COMMAND, env=env), agents.CommandAgent(COMMAND, env=env)):
        assert agent._env["http_proxy"] == "http://proxy:3128"
        assert "127.0.0.1" in agent._env["NO_PROXY"].split(",")


def test_options_of_the_program_verifiers_are_checked_before_it_starts() -> None:
    config = verifiers.Config(python="none/python", env={"taskset": {"id": "x"}})
    (fault,) = config.faults(ThisMachine(), Path("model"))
    assert fault == ("python", "no program 'none/python' here: make venv-verifiers makes one")
    with pytest.raises(ConfigError, match=r"rollout.program_options.session.*command"):
        verifiers.check(verifiers.Config(env={"taskset": {}}, session={"command": ["x"]}))
    with pytest.raises(ConfigError, match=r"session.*'brunch'|brunch"):
        verifiers.check(verifiers.Config(env={"taskset": {}}, session={"brunch": "last"}))
