"""What a recipe says of tools, under `rollout.program_options`. Imports no tool."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from meshrl.contract.config import Config


class ToolConfig(Config):
    """One Python function, or the tools of one MCP server: exactly one of `function`, `command` and `url`."""

    function: str = ""
    """`package.module.function` or `path/to/file.py:function`, with type hints; its docstring tells the policy what
    it does."""
    command: list[str] = Field(default_factory=list)
    """An MCP server that speaks over stdin and stdout, started by each rollout worker."""
    url: str = ""
    """An MCP server that is there already, over streamable HTTP."""
    name: str = ""
    """What the policy calls a function; empty: the function's own name."""
    only: list[str] = Field(default_factory=list)
    """Names of the server's tools that the policy may call; empty: all."""
    env: dict[str, str] = Field(default_factory=dict)
    """Environment of `command`; besides it has PATH, HOME and the like, and nothing else of the worker's."""
    cwd: str | None = None
    """Directory of `command`."""
    headers: dict[str, str] = Field(default_factory=dict)
    """Sent to `url` with every request, `Authorization` for instance."""
    timeout_s: PositiveFloat = 30.0
    """A call that takes longer is told to the policy as timed out."""
    start_timeout_s: PositiveFloat = 30.0
    """An MCP server that does not answer in this time cannot be started: a fault, not an observation."""
    concurrency: PositiveInt = 16
    """Calls at once of one worker to each tool; others wait, and waiting is not part of `timeout_s`."""
    stateful: bool = False
    """Calls change what later calls of their row find. Every row then has a session of its own with an MCP server,
    and a row that another worker goes on with repeats its calls there instead of keeping what they said."""

    @model_validator(mode="after")
    def _one_of_three(self) -> Self:
        given = [name for name in ("function", "command", "url") if getattr(self, name)]
        if len(given) != 1:
            said = " and ".join(given) or "none of them"
            raise ValueError(f"want exactly one of function, command and url, got {said}")
        return self


class ToolsConfig(Config):
    """`rollout.program_options` for `rollout.program: tools`."""

    tools: list[ToolConfig | str] = Field(min_length=1)
    """What the policy may call; a text is a `function` with defaults. A task may narrow it down
    (`extra_info.tool_selection`) and give arguments that the policy does not see (`extra_info.tools_kwargs`)."""
    format: str = "hermes"
    """How the policy writes its calls: a module of `meshrl.rollout.tools.formats`, or a dotted path."""
    max_turns: PositiveInt | None = 16
    """Turns of the policy in one row; null: any number that fits `data.max_response_length`."""
    max_turn_tokens: PositiveInt | None = None
    """Tokens of one turn; null: what is left of `data.max_response_length`."""
    max_calls: PositiveInt = 8
    """Calls of one turn that are done, at the same time; what is beyond is answered with an error."""
    max_result_tokens: PositiveInt = 512
    """A longer result is cut."""
    cut: Literal["left", "middle", "right"] = "middle"
    """Which part of a long result goes."""
    stop: list[str] = Field(default_factory=list)
    """Texts that end a turn, beside `rollout.stop`: `</tool_call>`, where the policy does not end its turn itself."""
    role: str = "tool"
    """The role of a message with a result; `user`, where the chat template knows no tools."""
