"""The program `container_agent`: a command works in the container of its row, and samples by the gateway.

    box ─ command ──▶ 127.0.0.1:PORT of the box ──▶ gateway ──▶ Session ──▶ engine
            │                                                     └── what was sampled ──▶ the row
            └── ends, with all its processes ─▶ tests come in ─▶ reward

The worker itself listens there (`Box.listen`): a connection comes from that box, so it samples for that row and does
nothing else. The container holds no key, and nothing of the task that tells how it is tested. See
docs/how-to/agents-in-containers.md.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import Field
from typing_extensions import override

from meshrl.common.config import Environment, read_options
from meshrl.contract.errors import ConfigError
from meshrl.contract.types import Json
from meshrl.rollout.agents.agent import Agent, AgentError, Led
from meshrl.rollout.agents.session import Address, Gateway
from meshrl.rollout.containers.pool import Pool
from meshrl.rollout.ports import Generator, Program, Rollout
from meshrl.rollout.programs.container import BoxedProgram, Work, row_fault
from meshrl.rollout.programs.openai import OpenAIProgram, SessionConfig
from meshrl.rollout.tokenizer import Tokenizer

__all__ = ["BOXES", "USES_GATEWAY", "Config", "build", "row_fault"]

log = logging.getLogger(__name__)

BOXES = True
"""The worker has a pool of containers."""
USES_GATEWAY = True
"""The worker has a gateway, too; each row has its reward."""
HIDDEN = ("ground_truth", "extra_info")
"""Parts of a task that say how it is tested."""
INSTRUCTION = "INSTRUCTION"
INSTRUCTION_BYTES = 64 << 10
"""The longest text that becomes a variable; Linux has a limit of 128 KiB."""


class Config(SessionConfig):
    """`rollout.program_options` for `rollout.program: container_agent`."""

    command: list[str] = Field(min_length=1)
    """A program of the container and its arguments, run for each row in the task's folder with OPENAI_BASE_URL,
    OPENAI_API_KEY, the same of ANTHROPIC, INSTRUCTION, and the task as JSON on stdin."""
    env: Environment = Field(default_factory=dict)
    """Additional environment variables of `command`."""
    root: str = ""
    """An image in place of each task's own, as for the program `container`."""
    on_agent_error: Literal["infra_fault", "policy_fault"] = "policy_fault"
    """As for the program `openai`, with another default: a policy can end an agent that runs beside it."""


def build(options: Mapping[str, object], *, gateway: Gateway | None, boxes: Pool) -> Program:
    """The program. Raises ConfigError for wrong options, or without a gateway."""
    config = read_options(Config, options, where="rollout.program_options")
    if not boxes.listens:
        raise ConfigError(
            "the program container_agent reaches the gateway by the loopback of its containers; want another"
            " rollout.containers.backend than kubernetes"
        )
    if gateway is None:
        raise ConfigError(
            "the program container_agent needs a gateway, and only a rollout service has one"
        )
    return ContainerAgentProgram(config, gateway, boxes)


class ContainerAgentProgram(BoxedProgram):
    """One session of a command a row."""

    def __init__(self, config: Config, gateway: Gateway, boxes: Pool) -> None:
        super().__init__(config.root, boxes)
        self._config = config
        self._gateway = gateway

    @override
    async def work(
        self, work: Work, engine: Generator, tokenizer: Tokenizer
    ) -> tuple[Rollout, Mapping[str, float]]:
        agent = BoxAgent(self._config, self._gateway, work)
        session = OpenAIProgram(self._config, self._gateway, agent)
        return await session(work.task, work.uid, engine, tokenizer), {}


@dataclass(frozen=True, slots=True)
class BoxAgent(Agent):
    """A command in the box of its row."""

    config: Config
    gateway: Gateway
    work: Work

    @override
    async def __call__(self, task: Mapping[str, Json], address: Address) -> Led:
        """At the end of its time it is ended, and what it has done is scored."""
        work, config = self.work, self.config
        shown = {name: value for name, value in task.items() if name not in HIDDEN}
        listener = await work.box.listen()
        async with self.gateway.bound(address, listener) as inside:
            done = await work.box.run(
                config.command,
                timeout_s=work.time_s,
                stdin=json.dumps(shown).encode() + b"\n",
                folder=work.folder,
                variables={
                    **work.variables,
                    **_instruction(shown),
                    **config.env,
                    **inside.environment,
                },
            )
        if done.timed_out:
            log.info("%s: the agent was ended after %.0f s", work.uid, work.time_s)
        elif done.exit_code:
            lines: Sequence[str] = done.output.decode(errors="replace").strip().splitlines()
            said = lines[-1] if lines else ""
            raise AgentError(f"{config.command[0]} ended with {done.exit_code}: {said}")
        return Led()


def _instruction(task: Mapping[str, Json]) -> dict[str, str]:
    """The last message of the prompt as a variable, where it is a text that fits one."""
    messages = task["messages"]
    assert isinstance(messages, list)
    last = messages[-1]
    said = last.get("content") if isinstance(last, dict) else None
    fits = isinstance(said, str) and len(said.encode()) <= INSTRUCTION_BYTES and "\0" not in said
    return {INSTRUCTION: str(said)} if fits else {}
