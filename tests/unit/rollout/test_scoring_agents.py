"""The program `openai` with an agent that names conversations and scores every row, as that of verifiers does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from meshrl.contract.rows import column_posted
from meshrl.contract.types import POSTED_REWARD, Outcome, PostedReward, SamplingParams, Task, Uid
from meshrl.rollout.agents.agent import AgentError, Led
from meshrl.rollout.agents.requests import ContextLengthError, SessionRequest
from meshrl.rollout.agents.session import Address, AgentSession
from meshrl.rollout.ports import Rollout
from meshrl.rollout.programs.openai import OpenAIProgram, SessionConfig
from meshrl.rollout.tokenizer import HuggingFaceTokenizer

from ...chat_model import Scripted, chat_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> HuggingFaceTokenizer:
    return chat_tokenizer(tmp_path_factory.mktemp("talking"))


class Desk:
    """A gateway without HTTP, and the agent behind it: two seats talk, and `assistant` is the one that is trained."""

    prompt_tokens = None
    demand = 0

    def __init__(
        self, *, longer: str = "", fails: bool = False, reward: float | None = 0.5
    ) -> None:
        self.longer = longer
        self.fails = fails
        self.reward = reward

    @contextmanager
    def opened(self, session: AgentSession) -> Iterator[Address]:
        self.session = session
        yield Address(base_url="", api_key="")

    def hand_over(self, session: AgentSession, address: Address) -> bool:
        return False

    async def __call__(self, task: Mapping[str, Any], address: Address) -> Led:
        for seat in ("assistant", "user"):
            content = "x" * 40 if seat == self.longer else "x"
            asked = {"messages": ({"role": "user", "content": "hi"},), "conversation": seat}
            answer = await self.session.ask(SessionRequest(**asked)).whole()
            said = {"role": "assistant", "content": answer.text}
            more = (*asked["messages"], said, {"role": "user", "content": content})
            try:
                await self.session.ask(SessionRequest(messages=more, conversation=seat)).whole()
            except ContextLengthError as error:
                if self.fails:
                    raise AgentError(f"{seat}: {error}", conversation="assistant") from error
        reward = None if self.reward is None else PostedReward(score=self.reward)
        return Led(reward=reward, conversation="assistant")


async def played(tokenizer: HuggingFaceTokenizer, desk: Desk) -> tuple[Rollout, Scripted]:
    engine = Scripted(tokenizer, *"abcd")
    program = OpenAIProgram(SessionConfig(), desk, desk, scores_all=True)
    task = Task(
        run="run",
        task_id="t",
        prompt_ids=np.array([5], dtype=np.int32),
        sampling=SamplingParams(max_tokens=20),
    )
    return await program(task, Uid("run", "t", 0), engine, tokenizer), engine


def sampled(rollout: Rollout) -> list[int]:
    row = rollout.trajectory
    return [int(token) for token in row.tokens[row.loss_mask.astype(bool)]]


async def test_the_row_has_the_tokens_and_the_reward_of_the_seat_that_is_trained(
    tokenizer: HuggingFaceTokenizer,
) -> None:
    rollout, engine = await played(tokenizer, Desk())
    assert sampled(rollout) == [*engine.sampled[0][0], *engine.sampled[1][0]]
    assert column_posted(rollout.columns[POSTED_REWARD]) == PostedReward(score=0.5)
    assert rollout.outcome is Outcome.OK


async def test_an_episode_that_is_too_long_keeps_its_reward(
    tokenizer: HuggingFaceTokenizer,
) -> None:
    rollout, _ = await played(tokenizer, Desk(longer="assistant"))
    assert rollout.outcome is Outcome.TRUNCATED
    assert column_posted(rollout.columns[POSTED_REWARD]) == PostedReward(score=0.5)


async def test_an_agent_that_fails_on_what_is_too_long_is_scored_0_and_the_log_says_so(
    tokenizer: HuggingFaceTokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    rollout, _ = await played(tokenizer, Desk(longer="assistant", fails=True))
    assert rollout.outcome is Outcome.TRUNCATED
    assert column_posted(rollout.columns[POSTED_REWARD]) == PostedReward(score=0.0)
    assert "scored 0" in caplog.text and "data.max_response_length" in caplog.text


async def test_what_is_too_long_in_another_seat_is_not_the_policy_s_fault(
    tokenizer: HuggingFaceTokenizer,
) -> None:
    rollout, _ = await played(tokenizer, Desk(longer="user"))
    assert rollout.outcome is Outcome.OK
    with pytest.raises(AgentError, match=r"^user: .*data\.max_response_length"):
        await played(tokenizer, Desk(longer="user", fails=True))
