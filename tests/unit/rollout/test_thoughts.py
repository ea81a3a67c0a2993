"""Agents over chat templates that leave earlier thoughts out: which turns continue, and which begin a branch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from meshrl.common.chat_templates import drops_thoughts
from meshrl.contract.types import SamplingParams, Task, Uid
from meshrl.rollout.agents.requests import SessionRequest
from meshrl.rollout.agents.session import AgentSession, Branch, SessionRules
from meshrl.rollout.conversation import prompt_of
from meshrl.rollout.tokenizer import HuggingFaceTokenizer

from ...chat_model import Scripted
from ..trainer.published_templates import PUBLISHED, QWEN_3, Published

QWEN_3_5 = replace(
    QWEN_3,
    template=QWEN_3.template.replace(
        "{% if add_generation_prompt %}<|im_start|>assistant\n",
        "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n",
    ),
)
TEMPLATES = {**PUBLISHED, "Qwen3.5": QWEN_3_5}
DROPPED = {
    "Qwen2.5": set(),
    "Qwen3": {"user"},
    "Qwen3.5": {"user"},
    "Llama-3": {"tool"},
    "Gemma": set(),
    "Phi-3": set(),
    "Mistral": {"tool"},
    "DeepSeek-R1": {"user", "tool"},
    "GLM-4.5": {"user"},
    "gpt-oss": {"user", "tool"},
    "ChatML base": set(),
}
"""Roles before which a template leaves earlier thoughts out. Of a turn with a call Llama-3, Mistral and this short
gpt-oss show the call alone."""
ASKED = {"role": "user", "content": "x?"}
AGAIN = {"role": "user", "content": "y?"}
SAID = "2"


def tokenizer_of(published: Published) -> HuggingFaceTokenizer:
    return HuggingFaceTokenizer(published.tokenizer())


def thought(name: str) -> str:
    """A turn as a model of that kind samples it."""
    if name == "gpt-oss":
        return f"<|channel|>analysis<|message|>one<|end|><|start|>assistant<|channel|>final<|message|>{SAID}"
    opened = "" if name in ("DeepSeek-R1", "Qwen3.5") else "<think>\n"
    return f"{opened}one\n</think>\n\n{SAID}"


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_probe_knows_which_templates_leave_thoughts_out(name: str) -> None:
    tokenizer = tokenizer_of(TEMPLATES[name])
    found = drops_thoughts(lambda messages: tokenizer.render(messages, generation=False))
    assert found == DROPPED[name]


async def asked(session: AgentSession, *messages: dict[str, Any]) -> str:
    return (await session.ask(SessionRequest(messages=messages)).whole()).text


@pytest.mark.parametrize("branch", [Branch.EACH, Branch.LAST])
@pytest.mark.parametrize("name", TEMPLATES)
async def test_a_turn_after_a_thought_is_sampled_behind_what_the_template_shows(
    name: str, branch: Branch
) -> None:
    published = TEMPLATES[name]
    tokenizer = tokenizer_of(published)
    engine = Scripted(tokenizer, thought(name), thought(name), end=published.eos or "")
    task = Task(
        run="run",
        task_id="t",
        prompt_ids=np.array([5], dtype=np.int32),
        sampling=SamplingParams(max_tokens=400),
    )
    session = AgentSession(task, Uid("run", "t", 0), engine, tokenizer, SessionRules(branch=branch))
    first = await asked(session, ASKED)
    answer = {"role": "assistant", "content": first}
    await asked(session, ASKED, answer, AGAIN)
    begun, continued = (request.prompt_ids.tolist() for request in engine.requests)
    sampled = [*begun, *engine.sampled[0][0]]
    row = session.rollout().trajectory
    if "user" in DROPPED[name] and branch is Branch.EACH:
        assert continued == prompt_of(tokenizer, [ASKED, answer, AGAIN])
        assert len(row.tokens) == len(sampled) + len(continued) + len(engine.sampled[1][0])
    else:
        assert continued[: len(sampled)] == sampled
        assert len(row.tokens) == len(continued) + len(engine.sampled[1][0])
    trained = [token for tokens, _ in engine.sampled for token in tokens]
    assert row.tokens[row.loss_mask == 1].tolist() == trained
