"""The program `user`: a row is what an async function of yours makes of it.

    async def agent(session: Session) -> None:
        answer = await session.reply()
        while not right(answer, session.task.ground_truth):
            answer = await session.say("That is wrong. Try again.")

Where that is too little, a function of four parameters is a whole program (`meshrl.rollout.ports.Program`):

    async def agent(task: Task, uid: Uid, engine: Generator, tokenizer: Tokenizer) -> Rollout: ...
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pydantic import Field, PositiveInt

from meshrl.contract.config import Config as BaseConfig
from meshrl.contract.config import read_options
from meshrl.contract.errors import ConfigError, UserError
from meshrl.contract.types import Outcome, SamplingParams, Task, Uid
from meshrl.rollout.chat import ChatMessage
from meshrl.rollout.conversation import Budget, Conversation
from meshrl.rollout.ports import Generator, Program, Rollout
from meshrl.rollout.sessions.gateway import Gateway
from meshrl.rollout.tokenizer import Tokenizer
from meshrl.rollout.user_functions import check_function, load_function

KEY = "rollout.program_options.function"
WANT = "want async def agent(session) or async def agent(task, uid, engine, tokenizer)"


class Config(BaseConfig):
    """`rollout.program_options` for `rollout.program: user`."""

    function: str = Field(min_length=1)
    """`package.module.function` or `path/to/agent.py:function`."""
    max_turns: PositiveInt | None = None
    """Turns of the policy in one row; null: any number that fits `data.max_response_length`."""
    max_turn_tokens: PositiveInt | None = None
    """Tokens of one turn; null: what is left of `data.max_response_length`."""


def check(config: Config) -> None:
    """What a recipe can be told before anything starts; raises ConfigError."""
    check_function(config.function, KEY)


class EndedError(Exception):
    """The conversation has no room for another turn. The row ends here, unless the function has something to add."""


class Session:
    """One row, as a function of yours sees it. One turn at a time."""

    def __init__(
        self, conversation: Conversation, engine: Generator, task: Task, sampling: SamplingParams
    ) -> None:
        self.task = task
        """The prompt, its `ground_truth` and `extra_info`."""
        self.finish_reason = ""
        """Of the last turn: `stop`, or `length` where the turn was cut."""
        self.ended = ""
        """Why no turn follows any more: `length` or `max_turns`; empty: one may."""
        self._conversation = conversation
        self._engine = engine
        self._sampling = sampling

    @property
    def uid(self) -> Uid:
        """The name of the row: its draws, and a seed for yours, depend on it alone."""
        return self._conversation.uid

    @property
    def tokens_left(self) -> int:
        """Tokens that may still be said, by whomever."""
        return self._conversation.left

    async def reply(self) -> str:
        """The policy's next turn as text: its answer to the prompt, or to the last message.

        Raises:
            EndedError: it has had all its turns or tokens.
        """
        self._check_room()
        turn = await self._conversation.sample(self._engine, self._sampling)
        self.finish_reason = turn.finish_reason
        if turn.finish_reason not in ("stop", "length"):
            raise self._end(turn.finish_reason)
        return turn.text

    async def say(self, content: str, *, role: str = "user") -> str:
        """Add a message, which is not trained on, and let the policy answer.

        Raises:
            EndedError: there is no room for message and answer.
        """
        return await self.tell([{"role": role, "content": content}])

    async def tell(self, messages: Sequence[ChatMessage]) -> str:
        """The same with several messages, or with more in them than `role` and `content`."""
        if not self._conversation.turns:
            raise UserError("the prompt is the policy's to answer first: `await session.reply()`")
        self._check_room()
        if not self._conversation.observe(messages):
            raise self._end("length")
        return await self.reply()

    def _check_room(self) -> None:
        if self._conversation.full:
            raise self._end("max_turns" if self._conversation.left else "length")

    def _end(self, reason: str) -> EndedError:
        self.ended = reason
        return EndedError(f"the conversation has ended: {reason}")


def build(options: Mapping[str, object], *, gateway: Gateway | None = None) -> Program:
    """The program; raises ConfigError where the function is not there or not what it should be."""
    config = read_options(Config, options, where="rollout.program_options")
    function = load_function(config.function, KEY)
    parameters = _parameters(function, config.function)
    if parameters == 4:
        return WholeProgram(function, config.function)
    return SessionProgram(function, config)


class WholeProgram:
    """A function that makes the row itself."""

    def __init__(self, function: Callable[..., Any], name: str) -> None:
        self._function = function
        self._name = name

    async def __call__(
        self, task: Task, uid: Uid, engine: Generator, tokenizer: Tokenizer
    ) -> Rollout:
        """See `meshrl.rollout.ports.Program`."""
        found = await self._function(task, uid, engine, tokenizer)
        if not isinstance(found, Rollout):
            raise UserError(f"{self._name} returned {type(found).__name__}, want a Rollout")
        return found


class SessionProgram:
    """A function that leads a `Session`."""

    def __init__(self, function: Callable[..., Any], config: Config) -> None:
        self._function = function
        self._config = config

    async def __call__(
        self, task: Task, uid: Uid, engine: Generator, tokenizer: Tokenizer
    ) -> Rollout:
        """See `meshrl.rollout.ports.Program`."""
        config = self._config
        budget = Budget.of(task, turn_tokens=config.max_turn_tokens, turns=config.max_turns)
        conversation = Conversation(uid, tokenizer, task.prompt_ids, budget=budget)
        session = Session(conversation, engine, task, task.sampling)
        try:
            outcome = await self._function(session)
        except EndedError:
            return conversation.rollout(session.ended)
        if outcome is not None and not isinstance(outcome, Outcome):
            said = type(outcome).__name__
            raise UserError(f"{config.function} returned {said}, want None or an Outcome")
        if not conversation.turns:
            raise UserError(f"{config.function} returned before the policy said anything")
        return conversation.rollout(session.ended or None, outcome=outcome)


def _parameters(function: Callable[..., Any], name: str) -> int:
    """How many there are: 1 or 4."""
    if not inspect.iscoroutinefunction(function):
        raise ConfigError(f"{KEY}: {name!r} is not async; {WANT}", key=KEY)
    parameters = inspect.signature(function).parameters.values()
    needed = [p for p in parameters if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    if len(needed) not in (1, 4):
        names = ", ".join(p.name for p in needed) or "none"
        raise ConfigError(f"{KEY}: {name!r} has the parameters {names}; {WANT}", key=KEY)
    return len(needed)
