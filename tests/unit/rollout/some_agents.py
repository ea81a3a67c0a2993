"""Agents for tests of the program `user`."""

from __future__ import annotations

from meshrl.contract.types import Outcome, Task, Uid
from meshrl.rollout.conversation import Budget, Conversation
from meshrl.rollout.ports import Generator, Rollout
from meshrl.rollout.programs.user import EndedError, Session
from meshrl.rollout.tokenizer import Tokenizer

seen: list[str] = []


async def insist(session: Session) -> None:
    answer = await session.reply()
    while str(session.task.ground_truth) not in answer:
        seen.append(answer)
        answer = await session.say("Wrong.")


async def judge(session: Session) -> Outcome:
    await session.reply()
    return Outcome.POLICY_FAULT


async def catch(session: Session) -> None:
    try:
        while True:
            await (session.say("More.") if seen else session.reply())
            seen.append(session.finish_reason)
    except EndedError:
        seen.append(f"{session.ended}, {session.tokens_left} left")


async def say_first(session: Session) -> None:
    await session.say("Hello.")


async def say_nothing(session: Session) -> None: ...


async def return_text(session: Session) -> str:
    return await session.reply()


async def score(session: Session) -> dict[str, float] | float | Outcome | None:
    """The score that the policy's answer names."""
    said = await session.reply()
    if said == "more":
        await session.say("More!")
    known = {"half": 0.5, "much": {"score": 2, "steps": 3}, "bad": Outcome.POLICY_FAULT}
    return known.get(said)


async def whole(task: Task, uid: Uid, engine: Generator, tokenizer: Tokenizer) -> Rollout:
    conversation = Conversation(uid, tokenizer, task.prompt_ids, budget=Budget.of(task))
    await conversation.sample(engine, task.sampling)
    return conversation.rollout()


async def whole_but_wrong(task: Task, uid: Uid, engine: Generator, tokenizer: Tokenizer) -> int:
    return 3


def not_async(session: Session) -> None: ...


async def two(task: Task, uid: Uid) -> None: ...
