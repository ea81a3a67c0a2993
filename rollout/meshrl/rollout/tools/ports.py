"""The port of a tool, and the call that a policy makes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from meshrl.contract.types import Json, Task, Uid

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
    """For a model that reads text only: `[image]` stands for each picture."""
    pictures: tuple[object, ...]
    """Bytes of files, or pictures of Pillow."""

    def content(self, text: str) -> list[dict[str, object]]:
        """Content parts for a model that reads pictures; `text` is what is shown of the result's own."""
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
