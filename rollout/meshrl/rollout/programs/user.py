"""The program `user`: your async function leads the conversation of a row.

    async def agent(session: Session) -> None:
        answer = await session.reply()
        while not right(answer, session.task.ground_truth):
            answer = await session.say("That is wrong. Try again.")

If that is too little, a function of four parameters is a complete program (`meshrl.rollout.ports.Program`):

    async def agent(task: Task, uid: Uid, engine: Generator, tokenizer: Tokenizer) -> Rollout: ...
"""

from __future__ import annotations

import ast
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from pydantic import Field, PositiveInt
from typing_extensions import override

from meshrl.common.config import Config as BaseConfig
from meshrl.common.config import read_options
from meshrl.common.user_functions import check_function, load_function
from meshrl.contract.errors import ConfigError, UserError
from meshrl.contract.rows import posted_column
from meshrl.contract.types import POSTED_REWARD, Outcome, SamplingParams, Task, Uid
from meshrl.images.messages import content_with
from meshrl.rollout.agents.agent import posted
from meshrl.rollout.agents.session import Gateway
from meshrl.rollout.conversation import Budget, ChatMessage, Conversation
from meshrl.rollout.ports import Generator, Program, Rollout
from meshrl.rollout.tokenizer import Tokenizer

log = logging.getLogger(__name__)

KEY = "rollout.program_options.function"
WANT = "want async def agent(session) or async def agent(task, uid, engine, tokenizer)"


class Config(BaseConfig):
    """`rollout.program_options` for `rollout.program: user`."""

    function: str = Field(min_length=1)
    """`package.module.function` or `path/to/agent.py:function`."""
    max_turns: PositiveInt | None = None
    """Turns of the policy in one row; null: any number that fits `data.max_response_length`."""
    max_turn_tokens: PositiveInt | None = None
    """Tokens of one turn; null: as many as are left of `data.max_response_length`."""
    posts_reward: bool = False
    """The function returns the reward of its row: a number, or a dict with `score` and further numbers; None: the
    recipe's reward scores the row. An `EndedError` that it lets through is the reward 0."""


def check(config: Config) -> None:
    """Check the options before anything starts; raises ConfigError."""
    node = check_function(config.function, KEY)
    if node is None:
        return
    given = node.args
    positional = [*given.posonlyargs, *given.args]
    needed = [each.arg for each in positional[: len(positional) - len(given.defaults)]]
    _check_form(config.function, isinstance(node, ast.AsyncFunctionDef), needed)


class EndedError(Exception):
    """The conversation cannot have another turn. If the function does not catch it, the row ends here."""


class Session:
    """One row, as your function sees it. One turn at a time."""

    def __init__(
        self, conversation: Conversation, engine: Generator, task: Task, sampling: SamplingParams
    ) -> None:
        self.task = task
        """The prompt, its `ground_truth` and `extra_info`."""
        self.finish_reason = ""
        """Finish reason of the last turn: `stop`, or `length` if the turn was cut."""
        self.ended = ""
        """Why no further turn is possible: `length` or `max_turns`; empty: one is."""
        self._conversation = conversation
        self._engine = engine
        self._sampling = sampling

    @property
    def uid(self) -> Uid:
        """The id of the row; its draws depend on nothing else, and neither should a seed of yours."""
        return self._conversation.uid

    @property
    def tokens_left(self) -> int:
        """Tokens that may still be added, sampled or observed."""
        return self._conversation.left

    async def reply(self) -> str:
        """The policy's next turn as text: its answer to the prompt, or to the last message.

        Raises:
            EndedError: it has had all its turns or tokens.
        """
        self._check_not_full()
        turn = await self._conversation.sample(self._engine, self._sampling)
        self.finish_reason = turn.finish_reason
        if turn.finish_reason not in ("stop", "length"):
            raise self._end(turn.finish_reason)
        return turn.text

    async def say(self, content: str, *, role: str = "user", images: Sequence[object] = ()) -> str:
        """Add a message, which is not trained on, and let the policy answer.

        Args:
            content: Its text; `<image>` stands for a picture.
            role: Who says it.
            images: Images for a vision-language model: bytes of files, or pictures of Pillow. They stand at the
                marks, or before a text without any.

        Raises:
            EndedError: message and answer do not fit.
            UserError: pictures that the model cannot read, or another number of marks.
        """
        said = content_with(content, images) if images else content
        return await self.tell([{"role": role, "content": said}])

    async def tell(self, messages: Sequence[ChatMessage]) -> str:
        """As `say`, with several messages, other keys than `role` and `content`, or content parts."""
        if not self._conversation.turns:
            raise UserError("the policy must answer the prompt first: `await session.reply()`")
        self._check_not_full()
        await self._conversation.look_at(messages)
        if not self._conversation.observe(messages):
            raise self._end("length")
        return await self.reply()

    def row(self, *, outcome: Outcome | None = None) -> Rollout:
        """The conversation so far as a row; `outcome` replaces that of its end."""
        return self._conversation.rollout(self.ended or None, outcome=outcome)

    def _check_not_full(self) -> None:
        if self._conversation.full:
            raise self._end("max_turns" if self._conversation.left else "length")

    def _end(self, reason: str) -> EndedError:
        self.ended = reason
        return EndedError(f"the conversation has ended: {reason}")


def build(options: Mapping[str, object], *, gateway: Gateway | None = None) -> Program:
    """The program; raises ConfigError if the function does not exist or has the wrong parameters."""
    config = read_options(Config, options, where="rollout.program_options")
    function = load_function(config.function, KEY)
    parameters = _parameters(function, config.function)
    if parameters == 4:
        return partial(_whole, function, config.function)
    return SessionProgram(function, config)


async def _whole(function: Callable[..., Any], name: str, *given: object) -> Rollout:
    """The row that a function returns."""
    rollout = await function(*given)
    if not isinstance(rollout, Rollout):
        raise UserError(f"{name} returned {type(rollout).__name__}, want a Rollout")
    return rollout


class SessionProgram(Program):
    """A function that leads a `Session`."""

    def __init__(self, function: Callable[..., Any], config: Config) -> None:
        self._function = function
        self._config = config

    @override
    async def __call__(
        self, task: Task, uid: Uid, engine: Generator, tokenizer: Tokenizer
    ) -> Rollout:
        config = self._config
        budget = Budget.of(task, turn_tokens=config.max_turn_tokens, turns=config.max_turns)
        prompt, media = task.prompt_ids, task.media
        conversation = Conversation(uid, tokenizer, prompt, budget=budget, media=media)
        session = Session(conversation, engine, task, task.sampling)
        try:
            outcome = await self._function(session)
        except EndedError as ended:
            if config.posts_reward:
                log.info("%s: scored 0: %s, and %s returned nothing", uid, ended, config.function)
            return self._posted(session.row(), 0.0)
        if not conversation.turns:
            raise UserError(f"{config.function} returned before the policy had a turn")
        if config.posts_reward and not isinstance(outcome, Outcome):
            return self._posted(session.row(), outcome)
        if outcome is not None and not isinstance(outcome, Outcome):
            name, hint = type(outcome).__name__, ""
            if isinstance(outcome, int | float | Mapping):
                hint = "; a reward needs rollout.program_options.posts_reward"
            raise UserError(f"{config.function} returned {name}, want None or an Outcome{hint}")
        return self._posted(session.row(outcome=outcome))

    def _posted(self, rollout: Rollout, reward: object = None) -> Rollout:
        """The row with its reward, where the run has such a column."""
        if not self._config.posts_reward:
            return rollout
        return replace(rollout, columns={POSTED_REWARD: posted_column(posted(reward))})


def _parameters(function: Callable[..., Any], name: str) -> int:
    """How many parameters: 1 or 4."""
    parameters = inspect.signature(function).parameters.values()
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.POSITIONAL_ONLY)
    needed = [p.name for p in parameters if p.default is p.empty and p.kind in kinds]
    _check_form(name, inspect.iscoroutinefunction(function), needed)
    return len(needed)


def _check_form(name: str, coroutine: bool, needed: Sequence[str]) -> None:
    """Raises ConfigError for a function that is not async, or needs other parameters than 1 or 4."""
    if not coroutine:
        raise ConfigError(f"{KEY}: {name!r} is not async; {WANT}", key=KEY)
    if len(needed) not in (1, 4):
        names = ", ".join(needed) or "none"
        raise ConfigError(f"{KEY}: {name!r} has the parameters {names}; {WANT}", key=KEY)
