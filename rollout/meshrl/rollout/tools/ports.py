"""The port of a tool, the call that a policy makes, and the options of the program `tools`. Imports no tool."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol, Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from meshrl.common.config import Config, Environment, Machine
from meshrl.contract.types import Json, Task, Uid

FORMATS = "meshrl.rollout.tools.formats"
NO_PICTURE = "[image]"
"""Stands for a picture in a text."""


class ToolError(Exception):
    """A tool could not do what the policy asked: the policy observes the message; it is no fault of the mesh."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A call as the policy wrote it."""

    name: str
    arguments: Mapping[str, Json] = field(default_factory=dict)
    problem: str = ""
    """Why the call is invalid; the policy observes it in place of a result. Empty: the call is valid."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCaller:
    """The row for which a tool is called."""

    task: Task
    uid: Uid
    given: Mapping[str, Json] = field(default_factory=dict)
    """Arguments from the task that the policy does not see (`extra_info.tools_kwargs`)."""


Caller = ToolCaller
"""Its name until 0.3, for tools of your own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pictured:
    """A result with pictures."""

    text: str
    """The text for a language model: `[image]` stands for each picture."""
    pictures: tuple[object, ...]
    """Bytes of files, or pictures of Pillow."""

    def content(self, text: str) -> list[dict[str, object]]:
        """Content parts for a vision-language model; `text` is what is shown of the result's own."""
        said = [{"type": "image", "image": each} for each in self.pictures]
        rest = text.replace(NO_PICTURE, "").strip()
        return [*said, {"type": "text", "text": rest}] if rest else said


class Tool(Protocol):
    """A tool that a policy may call."""

    name: str
    description: str
    parameters: Mapping[str, Json]
    """JSON schema of an object."""
    stateful: bool
    """Whether a call may change the results of later calls of its row: such calls are repeated on another worker."""

    async def call(self, arguments: Mapping[str, Json], caller: ToolCaller) -> str | Pictured:
        """The result as text, or with pictures.

        Raises:
            ToolError: wrong arguments, or the tool failed: an observation.
            InfraError: the tool cannot be reached: a fault, and the row is tried again.
        """
        ...

    async def check(self, caller: ToolCaller) -> None:
        """Called after a call that took too long and was cancelled.

        Raises:
            InfraError: the server hangs, not only the call.
        """
        ...


class ToolFormat(Protocol):
    """The format of a model's calls: a module of `meshrl.rollout.tools.formats`.

    It may assign `STOP`, texts that end a turn, and `OBSERVATION`, the text that follows a turn with a call, in which
    `{}` is the result: then prompts are not rendered again with the tools, and results are no messages.
    """

    def parse(self, text: str) -> Sequence[ToolCall]:
        """The calls in a turn, `text` with its special tokens, in order; empty if it calls no tool."""
        ...


KINDS = ("function", "command", "url", "python", "search")


class PythonConfig(Config):
    """The tool `python`: code of the policy in the strict sandbox, without network and files."""

    memory_bytes: PositiveInt = 512 << 20
    """Address space of a row's interpreter; the code beyond it gets a MemoryError."""
    imports: list[str] = Field(default_factory=list)
    """Modules that are imported once for all rows (`numpy`, `sympy`): each row's own import of them is then quick."""


class SearchConfig(Config):
    """The tool `search`: exactly one of `folder` and `url`."""

    folder: Path | None = None
    """Text files: `.txt` and `.md` with paragraphs, `.jsonl` with `{"contents": "title, newline, text"}` or
    `{"title", "text"}` on each line. Each rollout worker keeps an index of its own in memory (BM25)."""
    url: str = ""
    """A retriever that answers `POST` as Search-R1's and verl's do."""
    top_k: PositiveInt = 3
    """Passages of one result."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.folder is None) == (not self.url):
            raise ValueError("want exactly one of folder and url")
        return self


class ToolConfig(Config):
    """Exactly one of `function` (in Python), `command` or `url` (tools of an MCP server), `python` and `search`."""

    function: str = ""
    """`package.module.function` or `path/to/file.py:function`, with type hints; its docstring is the
    description that the policy sees."""
    command: list[str] = Field(default_factory=list)
    """An MCP server that speaks over stdin and stdout, started by each rollout worker."""
    url: str = ""
    """The address of a running MCP server, over streamable HTTP."""
    python: PythonConfig | None = None
    """Code of the policy, in a sandbox; `{}` for the defaults. Its variables last as long as the row."""
    search: SearchConfig | None = None
    """A search over a folder of text, or by a retriever."""
    name: str = ""
    """The name under which the policy calls a function, `python` or `search`; empty: its own name."""
    only: list[str] = Field(default_factory=list)
    """Names of the server's tools that the policy may call; empty: all."""
    env: Environment = Field(default_factory=dict)
    """Environment of `command`; it also has PATH, HOME and the like, and nothing else of the worker's."""
    cwd: str | None = None
    """Directory of `command`."""
    headers: dict[str, str] = Field(default_factory=dict)
    """Sent to `url` with every request, `Authorization` for instance."""
    timeout_s: PositiveFloat = 30.0
    """Deadline of a call; the policy observes that a later one timed out."""
    start_timeout_s: PositiveFloat = 30.0
    """Deadline of an MCP server's start and first answer; missing it is a fault, not an observation."""
    concurrency: PositiveInt = 16
    """Calls that one worker runs at once for each tool; others wait, which is not part of `timeout_s`."""
    stateful: bool = False
    """Calls change the results of later calls of their row. Every row then has its own session with an MCP server,
    and a row that another worker continues repeats its calls there instead of reusing their results."""

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        set_keys = [name for name in KINDS if getattr(self, name)]
        if len(set_keys) != 1:
            listed = " and ".join(set_keys) or "none of them"
            want = f"{', '.join(KINDS[:-1])} and {KINDS[-1]}"
            raise ValueError(f"want exactly one of {want}, got {listed}")
        return self


class ToolsConfig(Config):
    """`rollout.program_options` for `rollout.program: tools`."""

    tools: list[ToolConfig | str] = Field(min_length=1)
    """The tools that the policy may call; a text is a `function` with defaults. A task may select some of them
    (`extra_info.tool_selection`) and add arguments that the policy does not see (`extra_info.tools_kwargs`)."""
    format: str = "hermes"
    """The format of the policy's calls: a module of `meshrl.rollout.tools.formats`, or a dotted path."""
    max_turns: PositiveInt | None = 16
    """Turns of the policy in one row; null: any number that fits `data.max_response_length`."""
    max_turn_tokens: PositiveInt | None = None
    """Tokens of one turn; null: as many as are left of `data.max_response_length`."""
    max_calls: PositiveInt = 8
    """Calls of one turn that are run, at the same time; further calls are answered with an error."""
    max_result_tokens: PositiveInt = 512
    """A longer result is cut."""
    cut: Literal["left", "middle", "right"] = "middle"
    """Which part of a long result is left out."""
    stop: list[str] = Field(default_factory=list)
    """Texts that end a turn, besides `rollout.stop`: `</tool_call>`, if the policy does not end its turn itself."""
    role: str = "tool"
    """The role of a message with a result; `user`, if the chat template knows no tools."""

    def faults(self, machine: Machine, model: Path) -> Iterator[tuple[str, str]]:
        """The tool `python` without bubblewrap, `search` over a folder without its package."""
        for index, tool in enumerate(self.tools):
            if isinstance(tool, str):
                continue
            if tool.python is not None and machine.no_sandbox:
                yield f"tools.{index}.python", f"needs the strict sandbox: {machine.no_sandbox}"
            if tool.search is not None and tool.search.folder and not machine.installed("bm25s"):
                yield f"tools.{index}.search", "needs the package bm25s: pip install meshrl[search]"
