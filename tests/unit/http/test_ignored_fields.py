"""Fields of requests that other servers have and the gateway ignores."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest

from meshrl.contract.types import SamplingParams, Task, Uid
from meshrl.http.gateway.models import ChatBody, CompletionBody
from meshrl.rollout.agents.session import AgentSession

from ...chat_model import Scripted, chat_tokenizer

MESSAGES = [{"role": "user", "content": "x"}]


def test_fields_that_would_change_the_answer_elsewhere_are_named() -> None:
    body = {"messages": MESSAGES, "min_p": 0.1, "continue_final_message": True, "store": True}
    assert ChatBody.model_validate(body).ignored == ("continue_final_message", "min_p")
    assert CompletionBody.model_validate({"prompt": "x", "guided_json": {}}).ignored == (
        "guided_json",
    )
    plain = {"messages": MESSAGES, "metadata": {"a": "b"}, "top_k": None}
    assert ChatBody.model_validate(plain).ignored == ()


async def test_a_session_tells_of_each_field_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = chat_tokenizer(tmp_path)
    sampling = SamplingParams(max_tokens=4)
    task = Task(run="r", task_id="t", prompt_ids=np.zeros(1, np.int32), sampling=sampling)
    session = AgentSession(task, Uid("r", "t", 0), Scripted(tokenizer), tokenizer)
    with caplog.at_level(logging.WARNING):
        for fields in (("min_p",), (), ("min_p", "top_k"), ("top_k",)):
            session.tell_ignored(fields)
    told = [record.getMessage().rpartition(": ")[2] for record in caplog.records]
    assert told == ["min_p", "top_k"]
