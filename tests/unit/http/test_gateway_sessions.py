"""Sessions that are handed over to callers who wait for one."""

from __future__ import annotations

import asyncio
import time

import numpy as np
import pytest

from meshrl.contract.errors import WaitTimeoutError
from meshrl.contract.types import Task, Uid
from meshrl.http.gateway.sessions import SessionTable, address
from meshrl.rollout.agents.session import AgentSession

from ..rollout.chats import chat_tokenizer
from ..rollout.scripted import Scripted


@pytest.fixture
async def session() -> AgentSession:
    task = Task(run="run", task_id="t", prompt_ids=np.array([5], dtype=np.int32))
    tokenizer = chat_tokenizer()
    return AgentSession(task, Uid("run", "t", 0), Scripted(tokenizer, []), tokenizer)


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
    assert not table.hand_over(session, address("", session))


async def test_a_caller_that_leaves_gives_its_session_back(session: AgentSession) -> None:
    table = SessionTable(prompt_tokens=None)
    claiming = asyncio.create_task(table.claim(60))
    await asyncio.sleep(0)
    assert table.hand_over(session, address("", session))
    claiming.cancel()
    await asyncio.gather(claiming, return_exceptions=True)
    assert session.finished.is_set()
