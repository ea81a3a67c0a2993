"""The program `single_turn`: one prompt, one response."""

from __future__ import annotations

from meshrl.contract.types import Task, Uid
from meshrl.rollout.conversation import Budget, Conversation
from meshrl.rollout.ports import Generator, Rollout
from meshrl.rollout.tokenizer import Tokenizer


async def run(task: Task, uid: Uid, engine: Generator, tokenizer: Tokenizer) -> Rollout:
    """Sample one response to the task's prompt; see `meshrl.rollout.ports.Program`."""
    budget = Budget.of(task)
    conversation = Conversation(uid, tokenizer, task.prompt_ids, budget=budget, media=task.media)
    await conversation.sample(engine, task.sampling)
    return conversation.rollout()
