"""The program `seats`: your async function plays an episode of several named speakers.

    async def debate(episode: Episode) -> dict[str, float]:
        pro, con = episode.seat("pro"), episode.seat("con")
        said = await pro.say(str(episode.task.ground_truth))
        said = await con.say(said)
        return {"pro": 1.0, "con": 0.0}

An episode is one row: each trained seat is a part of it (`RowPart`), its reward the component of its name. Seats with
a url are another server's, and never trained. See docs/how-to/multi-agent.md.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from statistics import fmean
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import urlsplit

import numpy as np
from pydantic import Field, JsonValue, PositiveInt, model_validator
from typing_extensions import override

from meshrl.common.config import Config as BaseConfig
from meshrl.common.config import read_options
from meshrl.common.sockets import has_secret
from meshrl.common.user_functions import check_function, load_function
from meshrl.contract.errors import ConfigError, InfraError, MeshError, UnavailableError, UserError
from meshrl.contract.rows import parts_column, posted_column
from meshrl.contract.types import PARTS, POSTED_REWARD, Outcome, RowPart, Task, Uid
from meshrl.images.messages import has_pictures
from meshrl.rollout.agents.agent import posted
from meshrl.rollout.agents.history import anchor_of, end_to_end
from meshrl.rollout.agents.session import Gateway
from meshrl.rollout.conversation import OUTCOMES, Budget, ChatMessage, Conversation, prompt_of
from meshrl.rollout.ports import Generator, Program, Rollout
from meshrl.rollout.programs.user import KEY, EndedError, Session
from meshrl.rollout.tokenizer import ChatTokenizer, Tokenizer

if TYPE_CHECKING:
    from meshrl.rollout.server_engine.http import HttpClient

log = logging.getLogger(__name__)

POSTS_REWARD = True
TRAINS_SEATS = True
SEATS = "rollout.program_options.seats"
PAUSES_S = (1.0, 2.0, 4.0, 8.0)
"""Before each further try of a request to another server."""
ANSWER_S = 120.0
"""The longest time for an answer of another server."""


class SeatConfig(BaseConfig):
    """One speaker."""

    url: str = ""
    """`http://host:8000/v1` of a server with OpenAI's API: a frozen opponent, a simulated user. Empty: the policy."""
    model: str = ""
    """The model to ask at `url`."""
    key_env: str = ""
    """The environment variable of the rollout workers that has the server's key; empty: it asks for none."""
    request: dict[str, JsonValue] = Field(default_factory=dict)
    """Further keys of each request to `url`: `{temperature: 0.7, max_tokens: 200}`."""
    trained: bool | None = None
    """Train what is said here; null: exactly where the policy speaks."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.url and not self.model:
            raise ValueError("url wants the name of a model beside it")
        if self.url and self.trained:
            raise ValueError("trained is for the policy, and url is another's")
        if not self.url and (of_url := sorted(self.model_fields_set - {"url", "trained"})):
            raise ValueError(f"{of_url[0]} is for a seat with a url")
        return self

    @property
    def learns(self) -> bool:
        """Whether it is trained."""
        return not self.url and self.trained is not False

    def client(self, name: str) -> HttpClient:
        """Its server. Raises ConfigError or UserError where that must not be asked; they tell no secret."""
        from meshrl.rollout.server_engine.http import HttpClient  # needs httpx

        at = f"{SEATS}.{name}"
        key = os.environ.get(self.key_env)
        if has_secret(self.url):
            raise ConfigError(f"{at}.url: it holds a key or a password; want key_env")
        if urlsplit(self.url).scheme not in ("http", "https"):
            raise ConfigError(f"{at}.url: {self.url!r} does not start with http:// or https://")
        if self.key_env and not key:
            raise ConfigError(f"{at}.key_env: the variable {self.key_env} is not set")
        return HttpClient(f"seat {name}", self.url, key=key, silence_s=ANSWER_S, update_s=ANSWER_S)


class Config(BaseConfig):
    """`rollout.program_options` for `rollout.program: seats`."""

    function: str = Field(min_length=1)
    """`package.module.function` or `path/to/game.py:function`."""
    seats: dict[str, SeatConfig] = Field(min_length=1)
    """The speakers by name; `{}` is the policy, trained."""
    max_turn_tokens: PositiveInt | None = None
    """Tokens of one turn of the policy; null: as many as are left of `data.max_response_length`."""

    @model_validator(mode="after")
    def _named(self) -> Self:
        for name in self.seats:
            if not name.isidentifier() or name == "score":
                raise ValueError(f"seats: {name!r}: want letters, digits and _, and not score")
        if not any(seat.learns for seat in self.seats.values()):
            raise ValueError("seats: none is trained")
        return self


def check(config: Config) -> None:
    """Check the options before anything starts. Raises ConfigError."""
    check_function(config.function, KEY)
    _servers(config)


def build(options: Mapping[str, object], *, gateway: Gateway | None = None) -> Program:
    """The program. Raises ConfigError for wrong options, a function of another form, a server not to be asked."""
    config = read_options(Config, options, where="rollout.program_options")
    function = load_function(config.function, KEY)
    asked = len(inspect.signature(function).parameters)
    if not inspect.iscoroutinefunction(function) or asked != 1:
        raise ConfigError(f"{KEY}: {config.function!r} is none; want async def play(episode)")
    return SeatsProgram(function, config)


def _servers(config: Config) -> dict[str, HttpClient]:
    """Servers of seats. Raises ConfigError for one that must not be asked."""
    try:
        return {name: seat.client(name) for name, seat in config.seats.items() if seat.url}
    except ModuleNotFoundError as error:
        raise ConfigError(f"{SEATS}: a url needs httpx: pip install 'meshrl[client]'") from error
    except UserError as error:
        raise ConfigError(f"{SEATS}: {error.message}") from error


class EpisodeSeat:
    """One speaker of an episode, with a conversation that no other seat sees. One turn at a time."""

    def __init__(self, name: str, episode: Episode, config: Config, server: HttpClient | None):
        self.name = name
        self.trained = config.seats[name].learns
        self.session: Session | None = None
        self.anchors: list[str] = []
        """Observations that the policy's turns answer, by name."""
        self._episode = episode
        self._config = config
        self._server = server
        self._said: list[ChatMessage] = []

    @property
    def finish_reason(self) -> str:
        """The policy's last one, or why it can have no turn: `stop`, `length` where it was cut, `max_turns`."""
        return "stop" if self.session is None else self.session.ended or self.session.finish_reason

    async def say(self, content: str, *, role: str = "user") -> str:
        """Tell the seat something, and let it answer. Raises EndedError: it has had all its turns or tokens."""
        return await self.tell([{"role": role, "content": content}])

    async def tell(self, messages: Sequence[ChatMessage]) -> str:
        """As `say`, with several messages, such as a system's at the beginning."""
        if not messages or has_pictures(messages):
            raise UserError(f"seat {self.name}: want messages of text")
        if self._server is not None:
            said = await self._served(self._server, messages)
        elif self.session is None:
            self.session = self._begun(messages)
            said = await self.session.reply()
        else:
            said = await self.session.tell(messages)
        self.anchors.append(anchor_of(messages[-1]))
        new: list[ChatMessage] = [*messages, {"role": "assistant", "content": said}]
        self._said += new
        self._episode.messages += ({**each, "name": self.name} for each in new)
        return said

    def _begun(self, messages: Sequence[ChatMessage]) -> Session:
        """Its first messages count as the rest does: a seat's tokens fit `data.max_response_length`."""
        episode, config = self._episode, self._config
        prompt = np.array(prompt_of(episode.tokenizer, messages), dtype=np.int32)
        budget = Budget.of(episode.task, turn_tokens=config.max_turn_tokens)
        budget = replace(budget, response_tokens=budget.response_tokens - len(prompt))
        conversation = Conversation(
            episode.uid, episode.tokenizer, prompt, budget=budget, seat=self.name
        )
        return Session(conversation, episode.engine, episode.task, episode.task.sampling)

    async def _served(self, server: HttpClient, messages: Sequence[ChatMessage]) -> str:
        """The answer of another server, which gets the whole conversation each time."""
        own = self._config.seats[self.name]
        body = {**own.request, "model": own.model, "messages": [*self._said, *messages]}
        pauses = list(PAUSES_S)
        while True:
            try:
                answer = await server.call("POST", "/chat/completions", json=body)
                return str(answer["choices"][0]["message"]["content"] or "")
            except (InfraError, UnavailableError):
                if not pauses:
                    raise
            except (KeyError, IndexError, TypeError) as error:
                raise InfraError(f"{server.who} answers without a message") from error
            await asyncio.sleep(pauses.pop(0))


class Episode:
    """One row, as your function sees it."""

    def __init__(self, task: Task, uid: Uid, engine: Generator, tokenizer: ChatTokenizer) -> None:
        self.task = task
        """The prompt, its `ground_truth` and `extra_info`. A seat sees only what you tell it."""
        self.uid = uid
        """The id of the row; its draws depend on nothing else, and neither should a seed of yours."""
        self.engine = engine
        self.tokenizer = tokenizer
        self.seats: dict[str, EpisodeSeat] = {}
        self.messages: list[ChatMessage] = []
        """All that was said so far, by and to whichever seat (`name`), for people who read the row."""

    def seat(self, name: str) -> EpisodeSeat:
        """A speaker. Raises UserError where the recipe has none of that name."""
        if name not in self.seats:
            raise UserError(f"no seat {name!r}: {SEATS} has {', '.join(self.seats)}")
        return self.seats[name]


class SeatsProgram(Program):
    """A function that leads an `Episode`."""

    def __init__(self, function: Callable[..., Any], config: Config) -> None:
        self._function = function
        self._config = config
        self._trained = [name for name, seat in config.seats.items() if seat.learns]
        self._servers = _servers(config)

    async def start(self) -> None:
        """Raises ConfigError for a server that does not answer."""
        for name, server in self._servers.items():
            try:
                await server.call("GET", "/models", wait_s=10.0)
            except (InfraError, UserError) as error:
                if error.__cause__ is not None:  # else it answered, that it has no list of models
                    raise ConfigError(f"{SEATS}.{name}.url: {error.message}") from error
            except MeshError as error:
                raise ConfigError(f"{SEATS}.{name}.url: {error.message}") from error

    async def aclose(self) -> None:
        """Close the connections."""
        for server in self._servers.values():
            await server.close()

    @override
    async def __call__(
        self, task: Task, uid: Uid, engine: Generator, tokenizer: Tokenizer
    ) -> Rollout:
        if not isinstance(tokenizer, ChatTokenizer):
            raise ConfigError("the program seats needs a tokenizer that encodes")
        config = self._config
        episode = Episode(task, uid, engine, tokenizer)
        for name in config.seats:
            server = self._servers.get(name)
            episode.seats[name] = EpisodeSeat(name, episode, config, server)
        try:
            rewards = await self._function(episode)
        except EndedError as ended:
            log.info("%s: scored 0: %s, and %s returned nothing", uid, ended, config.function)
            rewards = dict.fromkeys(self._trained, 0.0)
        return self._row(episode, rewards)

    def _row(self, episode: Episode, rewards: object) -> Rollout:
        """The trained seats end to end. Raises UserError for rewards that are not theirs."""
        function, seats = self._config.function, list(episode.seats.values())
        aborted = [s.finish_reason for s in seats if s.finish_reason not in OUTCOMES]
        cut = [s.finish_reason for s in seats if s.trained and s.finish_reason != "stop"]
        reason = next(iter((*aborted, *cut)), "stop")
        trained = {seat.name: seat for seat in seats if seat.trained and seat.anchors}
        if not trained:
            names = " nor ".join(self._trained)
            kind = InfraError if aborted else UserError
            raise kind(f"{function} ended, and neither {names} had a turn ({reason})")
        given = rewards if isinstance(rewards, Mapping) else {}
        if missing := [n for n in trained if not isinstance(given.get(n), int | float)]:
            said = f"{rewards!r:.80}, without a reward of the trained seat {missing[0]!r}"
            raise UserError(f"{function} returned {said}")
        reward = posted({"score": fmean(given[name] for name in trained), **given})
        rows = [seat.session.row().trajectory for seat in trained.values() if seat.session]
        starts = accumulate((len(row.tokens) for row in rows), initial=0)
        parts = [
            RowPart(start=start, anchors=tuple(seat.anchors), seat=seat.name)
            for seat, start in zip(trained.values(), starts, strict=False)
        ]
        return Rollout(
            trajectory=end_to_end(rows, parts),
            outcome=OUTCOMES.get(reason, Outcome.CANCELLED),
            finish_reason=reason,
            columns={POSTED_REWARD: posted_column(reward), PARTS: parts_column(parts)},
            messages=episode.messages,
        )
