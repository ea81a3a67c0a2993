"""The program `openai`: a black-box agent leads the conversation, through an endpoint with OpenAI's API.

    agent ── POST {base_url}/chat/completions ──▶ gateway ──▶ Session ──▶ engine
      (a function, a command, or external)                       └── what was sampled ──▶ the row

See docs/how-to/train-an-agent.md. The outcome of a row is its last answer's (`stop` ok, `length` truncated), and
`truncated` once a request did not fit, whatever the agent did then. A fault of the engine is a fault of the row.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, PositiveInt, model_validator

from meshrl.common.config import Config as BaseConfig
from meshrl.common.config import Environment, read_options
from meshrl.common.user_functions import check_function
from meshrl.contract.errors import ConfigError
from meshrl.contract.types import Outcome, PostedReward, Task, Uid
from meshrl.rollout.agents.agent import (
    FUNCTION,
    Agent,
    AgentError,
    CommandAgent,
    FunctionAgent,
    task_json,
)
from meshrl.rollout.agents.agent_server import AgentServer
from meshrl.rollout.agents.session import Address, AgentSession, Branch, Gateway, SessionRules
from meshrl.rollout.ports import Generator, GiveBackError, Program, Rollout
from meshrl.rollout.tokenizer import ChatTokenizer, Tokenizer

log = logging.getLogger(__name__)

USES_GATEWAY = True
"""The worker opens a gateway, and rows may come with a reward."""


class SessionConfig(BaseConfig):
    """Options of every session, of functions, commands and external agents."""

    branch: Branch = Branch.LAST
    """Which branch of a conversation with several becomes the row: `last` (with the last answer), `longest` (with the
    most sampled tokens), `only` (a request that begins another branch is refused), or `each`: all of them, every one
    trained behind the history that it had (docs/how-to/train-an-agent.md)."""
    client_sampling: bool = False
    """Use `temperature`, `top_p`, `min_p`, `repetition_penalty` and `logit_bias` of requests. Otherwise those of
    `rollout` are used, under which the trainer computes log-probs."""
    tools_unseen: bool = False
    """Accept `tools` also if the chat template does not show them: the policy knows them from earlier training."""
    on_agent_error: Literal["infra_fault", "policy_fault"] = "infra_fault"
    """The outcome of a row whose agent fails: a fault of the infrastructure, and the row is tried again, or of the
    policy, and the row is trained on."""
    concurrent: PositiveInt = 16
    """Requests of one session that may run at once; further ones are answered with 429."""
    max_requests: PositiveInt = 1024
    """Requests of one session in total."""


class Config(SessionConfig):
    """`rollout.program_options` for `rollout.program: openai`."""

    function: str = ""
    """`package.module.function` or `path/to/agent.py:function`, called with `base_url`, `api_key` and `task`. A
    coroutine function runs in the worker's event loop, any other in a thread."""
    command: list[str] = Field(default_factory=list)
    """A program and its arguments, run for each row with OPENAI_BASE_URL, OPENAI_API_KEY, the same of ANTHROPIC, and
    the task on stdin."""
    external: bool = False
    """Agents are external: `POST /v1/sessions` gives them a waiting row."""
    env: Environment = Field(default_factory=dict)
    """Additional environment variables of `command`."""
    cwd: Path | None = None
    """Working directory of `command`."""

    @model_validator(mode="after")
    def _one_agent(self) -> Self:
        set_keys = [n for n in ("function", "command", "external") if getattr(self, n)]
        if len(set_keys) != 1:
            listed = " and ".join(set_keys) or "none of them"
            raise ValueError(f"want exactly one of function, command and external, got {listed}")
        return self


def check(config: Config) -> None:
    """Check the options before anything starts. Raises ConfigError."""
    if config.function:
        check_function(config.function, FUNCTION)
    if config.command and shutil.which(config.command[0], path=config.env.get("PATH")) is None:
        raise ConfigError(f"rollout.program_options.command: no program {config.command[0]!r} here")


def build(options: Mapping[str, object], *, gateway: Gateway | None) -> Program:
    """The program. Raises ConfigError for wrong options, an agent that cannot be imported, or without a gateway."""
    config = read_options(Config, options, where="rollout.program_options")
    if gateway is None:
        raise ConfigError("the program openai needs a gateway, and only a rollout service has one")
    return OpenAIProgram(config, gateway, _agent(config))


def _agent(config: Config) -> Agent | None:
    """The agent that leads the conversations; None: any client may claim them. Raises ConfigError."""
    if config.function:
        return FunctionAgent(config.function)
    if config.command:
        return CommandAgent(config.command, env=config.env, cwd=config.cwd)
    return None


class OpenAIProgram(Program):
    """One session of an agent a row."""

    def __init__(
        self,
        config: SessionConfig,
        gateway: Gateway,
        agent: Agent | None,
        *,
        scores_all: bool = False,
    ) -> None:
        """`agent` leads, or who claims a session; one that `scores_all` names its conversations, too."""
        self.external = agent is None
        """Rows are leased when external agents request them."""
        self._config = config
        self._gateway = gateway
        self._agent = agent
        self._scores_all = scores_all
        self._rules = SessionRules(
            branch=config.branch,
            client_sampling=config.client_sampling,
            tools_unseen=config.tools_unseen,
            concurrent=config.concurrent,
            requests=config.max_requests,
            prompt_tokens=gateway.prompt_tokens,
            conversations=self._scores_all,
        )

    async def start(self) -> None:
        """Start an agent that serves all rows. Raises ConfigError where it does not start."""
        if isinstance(self._agent, AgentServer):
            await self._agent.start()

    async def aclose(self) -> None:
        """End it."""
        if isinstance(self._agent, AgentServer):
            await self._agent.aclose()

    async def __call__(
        self, task: Task, uid: Uid, engine: Generator, tokenizer: Tokenizer
    ) -> Rollout:
        """One session from its first request to its end."""
        if not isinstance(tokenizer, ChatTokenizer):
            raise ConfigError("the program openai needs a tokenizer that encodes")
        session = AgentSession(task, uid, engine, tokenizer, self._rules)
        with self._gateway.opened(session) as address:
            try:
                failure = await self._lead(session, address, tokenizer)
            finally:
                await session.close("the agent has ended, or the row's deadline has passed")
        if session.left_out:
            log.info("%s: %d sampled tokens lie on other branches", uid, session.left_out)
        return session.rollout(outcome=self._outcome(session, failure))

    async def _lead(
        self, session: AgentSession, address: Address, tokenizer: Tokenizer
    ) -> AgentError | None:
        """Wait for the end of the conversation; the agent's failure, if it failed.

        Raises:
            MeshError: a fault of the engine, whatever happened to the agent.
        """
        leading = asyncio.ensure_future(self._conversation(session, address, tokenizer))
        try:
            ends: set[asyncio.Future[Any]] = {leading, session.fault}
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if session.fault.done():
                raise session.fault.result()
            leading.result()
        except AgentError as error:
            session.conversation = error.conversation
            if session.full and self._scores_all:
                log.info("%s: scored 0: %s; and so %s", session.uid, session.full, error)
                session.post(PostedReward(score=0.0))
            return error
        finally:
            leading.cancel()
            await asyncio.gather(leading, return_exceptions=True)
        return None

    async def _conversation(
        self, session: AgentSession, address: Address, tokenizer: Tokenizer
    ) -> None:
        if self._agent is None:
            if not self._gateway.hand_over(session, address):
                raise GiveBackError
            await session.finished.wait()
            if not session.asked:
                raise GiveBackError
            return
        led = await self._agent(task_json(session.task, session.uid, tokenizer), address)
        session.conversation = led.conversation
        if led.reward is not None:
            session.post(led.reward)

    def _outcome(self, session: AgentSession, failure: AgentError | None) -> Outcome | None:
        """None: the outcome of the last answer. Raises AgentError where it is not the policy's fault."""
        if session.full:
            return Outcome.TRUNCATED
        if failure is None:
            return None
        if session.history.turns and self._config.on_agent_error == "policy_fault":
            log.info("%s: the agent failed: %s", session.uid, failure)
            return Outcome.POLICY_FAULT
        raise failure
