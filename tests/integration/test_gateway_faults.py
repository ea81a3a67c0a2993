"""Agents that fail, hang, are killed or disconnect: each fault is the row's, with its reason."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import httpx
import openai
from openai import AsyncOpenAI

from meshrl.contract.types import Outcome
from meshrl.testing.engines.echo import Behaviour

from ..waiting import runs, until
from .gateway_agents import AGENT, echoing, leading
from .gateway_mesh import RUN, Mesh, agents_mesh, check_exact


async def test_an_agent_that_fails_is_a_fault_and_the_row_is_retried(
    talking_model: Path,
) -> None:
    tries: list[int] = []

    async def fail_first(client: AsyncOpenAI, task: Any) -> None:
        tries.append(1)
        await client.completions.create(model="m", prompt="x", max_tokens=3)
        if len(tries) == 1:
            raise RuntimeError("no idea")

    async with agents_mesh(talking_model, leading(fail_first)) as mesh:
        await mesh.rows(1)
        assert len(tries) == 2


async def test_an_agent_that_always_fails_is_given_up_with_its_reason(talking_model: Path) -> None:
    async def fail(client: AsyncOpenAI, task: Any) -> None:
        raise RuntimeError("no idea")

    async with agents_mesh(talking_model, leading(fail), max_attempts=2) as mesh:
        (letter,) = await mesh.dead()
        assert letter.outcome is Outcome.INFRA_FAULT
        assert "agent: RuntimeError: no idea" in letter.reason


async def test_a_failing_agent_may_be_the_policy_s_fault(talking_model: Path) -> None:
    async def fail(client: AsyncOpenAI, task: Any) -> None:
        await client.completions.create(model="m", prompt="x", max_tokens=3)
        raise RuntimeError("cannot read this")

    options = {**leading(fail), "on_agent_error": "policy_fault"}
    async with agents_mesh(talking_model, options) as mesh:
        batch = await mesh.queue.take(RUN, epoch=1, step=0, groups=1, batch_id="b", wait_s=60)
        assert [row.outcome for row in batch.rows] == [Outcome.POLICY_FAULT]


async def test_an_agent_that_runs_out_of_tokens_leaves_a_truncated_row(talking_model: Path) -> None:
    codes: list[str | None] = []

    async def talk_on(client: AsyncOpenAI, task: Any) -> None:
        prompt = "x"
        while True:
            try:
                more = await client.completions.create(model="m", prompt=prompt, max_tokens=8)
            except openai.BadRequestError as error:
                codes.append(error.code)
                raise
            prompt += more.choices[0].text + "and on and on"

    options = leading(talk_on)
    async with agents_mesh(talking_model, options, sampling={"max_tokens": 60}) as mesh:
        batch = await mesh.queue.take(RUN, epoch=1, step=0, groups=1, batch_id="b", wait_s=60)
        assert [row.outcome for row in batch.rows] == [Outcome.TRUNCATED]
        assert codes == ["context_length_exceeded"]


async def test_an_agent_past_its_deadline_is_killed_with_its_processes(
    talking_model: Path, tmp_path: Path
) -> None:
    pids = tmp_path / "pids"
    script = f"echo $$ >> {pids}; sleep 1000 & echo $! >> {pids}; wait"
    options = {"command": ["/bin/sh", "-c", script]}
    async with agents_mesh(talking_model, options, deadline_s=3.0, max_attempts=1) as mesh:
        (letter,) = await mesh.dead()
        assert letter.outcome is Outcome.TIMEOUT
    found = [int(pid) for pid in pids.read_text().split()]
    assert len(found) == 2
    assert not any(map(runs, found))


async def test_a_row_whose_agent_is_killed_is_retried(talking_model: Path, tmp_path: Path) -> None:
    once = tmp_path / "once"
    script = f"if [ ! -e {once} ]; then touch {once}; kill -9 $$; fi; exec {sys.executable} {AGENT}"
    async with agents_mesh(talking_model, {"command": ["/bin/sh", "-c", script]}) as mesh:
        for uid, row in (await mesh.rows(1)).items():
            check_exact(mesh, uid, row)
        assert mesh.worker.stats.failed == 1


async def test_a_fault_of_the_engine_is_the_row_s_whatever_the_agent_does(
    talking_model: Path,
) -> None:
    codes: list[int] = []

    async def shrug(client: AsyncOpenAI, task: Any) -> float:
        try:
            await client.completions.create(model="m", prompt="x")
        except openai.APIStatusError as error:
            codes.append(error.status_code)
        return 1.0

    async with (
        echoing(talking_model, Behaviour.FAIL) as engine,
        agents_mesh(talking_model, leading(shrug), engine=engine, max_attempts=1) as mesh,
    ):
        (letter,) = await mesh.dead()
        assert letter.outcome is Outcome.INFRA_FAULT
        assert "told to fail" in letter.reason
    assert set(codes) <= {500}


async def test_a_client_that_hangs_up_aborts_its_request(talking_model: Path) -> None:
    seen: list[Mesh] = []

    async def hang_up(client: AsyncOpenAI, task: Any) -> None:
        engine = seen[0].engine
        for count, stream in enumerate((False, True), 1):
            async with httpx.AsyncClient(timeout=60) as http:
                body = {"messages": [{"role": "user", "content": "x"}], "stream": stream}
                key = {"Authorization": f"Bearer {client.api_key}"}
                url = f"{client.base_url}chat/completions"
                pending = asyncio.create_task(http.post(url, json=body, headers=key))
                await until(lambda: len(engine.deltas) == count)  # noqa: B023
                pending.cancel()
                await asyncio.gather(pending, return_exceptions=True)
            await until(lambda: len(engine.left) == count)  # noqa: B023
        engine._engine.behave(Behaviour.ANSWER)
        await client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "y"}], max_tokens=4
        )

    async with (
        echoing(talking_model, Behaviour.STALL) as engine,
        agents_mesh(talking_model, leading(hang_up), engine=engine) as mesh,
    ):
        seen.append(mesh)
        ((_, row),) = (await mesh.rows(1)).items()
        assert engine.stats().running == 0
        assert "U:y" in mesh.tokenizer.decode(row.tokens.tolist())
        assert row.loss_mask.sum() == 4
