"""What a tool is, and what the policy says to call one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from meshrl.contract.types import Json, Task, Uid


class ToolError(Exception):
    """A tool could not do what the policy asked: the message is what the policy observes, no fault of the mesh."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """What the policy asked for."""

    name: str
    arguments: Mapping[str, Json] = field(default_factory=dict)
    problem: str = ""
    """Why this is no call, told to the policy in place of a result; empty: it is one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """The row on whose behalf a tool is called."""

    task: Task
    uid: Uid
    given: Mapping[str, Json] = field(default_factory=dict)
    """Arguments that the task gives and the policy does not see (`extra_info.tools_kwargs`)."""


class Tool(Protocol):
    """One thing that a policy may call."""

    name: str
    description: str
    parameters: Mapping[str, Json]
    """JSON schema of an object."""
    stateful: bool
    """Whether a call may change what later calls of its row find: a row that moves to another worker calls again."""

    async def call(self, arguments: Mapping[str, Json], caller: Caller) -> str:
        """The result as text.

        Raises:
            ToolError: wrong arguments, or the tool failed: an observation.
            InfraError: the tool cannot be reached: a fault, the row is tried again.
        """
        ...

    async def check(self, caller: Caller) -> None:
        """Called after a call that took too long and was cancelled.

        Raises:
            InfraError: it is not the call that hangs, but what should answer it.
        """
        ...


class ToolFormat(Protocol):
    """How a model writes its calls: a module of `meshrl.rollout.tools.formats`."""

    def parse(self, text: str) -> Sequence[ToolCall]:
        """The calls in a turn, `text` with its special tokens, in order; none where it asks for no tool."""
        ...
