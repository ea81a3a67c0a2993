"""The header by which a client of several conversations in one session names each."""

from __future__ import annotations

from pathlib import Path

import httpx
import numpy as np

from meshrl.contract.types import SamplingParams, Task, Uid
from meshrl.http.gateway.app import build_app
from meshrl.http.gateway.sessions import SessionTable
from meshrl.rollout.agents.session import AgentSession, SessionRules

from ...chat_model import Scripted, chat_tokenizer


async def test_a_request_belongs_to_the_conversation_that_its_header_names(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer(tmp_path)
    sessions = SessionTable(prompt_tokens=None)
    app = build_app(sessions, tokenizer, max_body_bytes=10_000, identity=None)
    sampling = SamplingParams(max_tokens=40)
    task = Task(run="r", task_id="t", prompt_ids=np.zeros(1, np.int32), sampling=sampling)
    engine = Scripted(tokenizer, "one", "two", "three")
    rules = SessionRules(conversations=True)
    session = AgentSession(task, Uid("r", "t", 0), engine, tokenizer, rules)
    transport = httpx.ASGITransport(app)
    with sessions.opened(session) as address:
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
            for name in ("a", "b", "a"):
                said = [{"role": "user", "content": "x"}]
                key = {"Authorization": f"Bearer {address.api_key}", "X-Session-ID": name}
                answer = await client.post(
                    f"{address.base_url}/chat/completions", json={"messages": said}, headers=key
                )
                assert answer.is_success
    assert [turn.conversation for turn in session.history.turns] == ["a", "b", "a"]
    session.conversation = "b"
    row = session.rollout().trajectory
    assert row.tokens[row.loss_mask.astype(bool)].tolist() == engine.sampled[1][0]
