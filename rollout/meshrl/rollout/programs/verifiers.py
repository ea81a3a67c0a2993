"""The program `verifiers`: rows are episodes of a `verifiers` environment, which is played as it is installed.

    row ─▶ agents/verifiers_server.py, in verifiers' Python environment ─▶ the environment ─▶ gateway ─▶ engine
       ◀── its reward ──────────────────────────────────────────────────────────┘

One process per worker plays all of its rows at the same time. See docs/how-to/environments.md.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import Field, PositiveFloat

from meshrl.common.config import Config as BaseConfig
from meshrl.common.config import Machine, read_options
from meshrl.common.python_process import start_words
from meshrl.contract.errors import ConfigError
from meshrl.rollout.agents.agent_server import AgentServer
from meshrl.rollout.agents.session import Gateway
from meshrl.rollout.ports import Program
from meshrl.rollout.programs.openai import OpenAIProgram, SessionConfig

USES_GATEWAY = True
OFFLINE = {"HF_HUB_OFFLINE": "1", "UV_OFFLINE": "1"}
SERVER = Path(__file__).parents[1] / "agents" / "verifiers_server.py"


class Config(BaseConfig):
    """`rollout.program_options` for `rollout.program: verifiers`."""

    python: str = ".venv-verifiers/bin/python"
    """The interpreter that has verifiers: an environment of its own."""
    env: dict[str, Any] = Field(min_length=1)
    """The `env` section of a verifiers configuration: `{taskset: {id: textarena, game: Hangman-v0}}`."""
    seat: str = ""
    """The seat that is trained, where the environment has several that may be; empty: the one that may be."""
    variables: dict[str, str] = Field(default_factory=dict)
    """Additional environment variables of the process."""
    start_timeout_s: PositiveFloat = 120.0
    """The longest time until the environment is loaded, with its first task."""
    cancel_timeout_s: PositiveFloat = 10.0
    """Seconds that the process may spend on an episode whose row has ended; then it is killed and started again."""
    session: dict[str, Any] = Field(default_factory=dict)
    """Options of the program `openai` for its conversations: `branch`, `concurrent`, `on_agent_error`, …"""

    def faults(self, machine: Machine, model: Path) -> Iterator[tuple[str, str]]:
        """Check that the interpreter exists."""
        if not machine.program(self.python):
            yield "python", f"no program {self.python!r} here: make venv-verifiers makes one"


def check(config: Config) -> None:
    """Check the options of its conversations. Raises ConfigError."""
    _session(config)


def row_fault(extra_info: Mapping[str, Any]) -> str:
    """Why a row with this `extra_info` names no task; empty where it does."""
    index = extra_info.get("index")
    if type(index) is int and index >= 0:
        return ""
    return f"extra_info.index is {index!r:.40}, want the number of a task of the environment"


def try_out(config: Config, machine: Machine) -> str:
    """Load the environment, in its own Python, and say why that cannot be; empty where it can, or is elsewhere."""
    env = {**OFFLINE, **config.variables}
    return machine.tried(_command(config, "check"), env, config.start_timeout_s)


def _command(config: Config, task: str) -> list[str]:
    """The words that start the process for a task of it."""
    words = [*start_words(config.python), str(SERVER), task]
    return [*words, json.dumps(config.env), config.seat]


def _session(config: Config) -> SessionConfig:
    return read_options(SessionConfig, config.session, where="rollout.program_options.session")


def build(options: Mapping[str, object], *, gateway: Gateway | None) -> Program:
    """The program. Raises ConfigError for wrong options, or without a gateway."""
    config = read_options(Config, options, where="rollout.program_options")
    if gateway is None:
        raise ConfigError(
            "the program verifiers needs a gateway, and only a rollout service has one"
        )
    agent = AgentServer(
        _command(config, "serve"),
        env={**OFFLINE, **config.variables},
        start_timeout_s=config.start_timeout_s,
        cancel_timeout_s=config.cancel_timeout_s,
    )
    return OpenAIProgram(_session(config), gateway, agent, scores_all=True)
