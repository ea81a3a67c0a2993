"""The tools of a worker: a call of the policy in, the text that the policy observes out.

call ─▶ known? arguments? ─▶ wait for a slot ─▶ tool, with a deadline ─▶ cut to the budget ─▶ observation
              │                                     │       └ late: "timed out"
              └── what is wrong ────────────────────┴──────────────────────────────────────────▶ observation
"""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from meshrl.common.plain_text import whole
from meshrl.common.user_functions import load_function
from meshrl.contract.errors import ConfigError, UserError
from meshrl.contract.types import Json, Task, Uid
from meshrl.rollout.tokenizer import ChatTokenizer, reads_pictures
from meshrl.rollout.tools.functions import FunctionTool
from meshrl.rollout.tools.mcp_servers import McpServer
from meshrl.rollout.tools.ports import (
    Pictured,
    Tool,
    ToolCall,
    ToolCaller,
    ToolConfig,
    ToolError,
    ToolsConfig,
)
from meshrl.rollout.tools.python_sandbox import PythonSandbox, PythonTool
from meshrl.rollout.tools.search import search_function

CHARACTERS = 16
"""Characters of a result that are read for each token that it may have."""
GAP = "...(truncated)..."


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolOffer:
    """A tool and its limits."""

    tool: Tool
    timeout_s: float
    slots: asyncio.Semaphore


class Toolbox:
    """Tools by name."""

    def __init__(self, offers: Sequence[ToolOffer], cut: Cut) -> None:
        """Raises ConfigError for two tools of one name."""
        self._offers: dict[str, ToolOffer] = {}
        self._cut = cut
        for offer in offers:
            name = offer.tool.name
            if name in self._offers:
                raise ConfigError(
                    f"two tools are called {name!r}; set `name` or `only` to tell them apart"
                )
            self._offers[name] = offer

    def of(self, task: Task) -> TaskTools:
        """The tools of `task`: all, or its `tool_selection`.

        Raises:
            UserError: its extra_info names unknown tools or parameters.
        """
        chosen = task.extra_info.get("tool_selection") or list(self._offers)
        kwargs = task.extra_info.get("tools_kwargs") or {}
        for name in (*chosen, *kwargs):
            if name not in self._offers:
                known = ", ".join(self._offers)
                raise UserError(f"task {task.task_id}: no tool {name!r} (known: {known})")
        hidden = {name: _execute_kwargs(task, name, each) for name, each in kwargs.items()}
        return TaskTools({name: self._offers[name] for name in chosen}, hidden, self._cut)


class TaskTools:
    """The tools of one task."""

    def __init__(
        self, offers: Mapping[str, ToolOffer], hidden: Mapping[str, Mapping[str, Json]], cut: Cut
    ) -> None:
        self._offers = offers
        self._hidden = hidden
        self._cut = cut

    @property
    def stateful(self) -> bool:
        """Whether calls of a row build on each other."""
        return any(offer.tool.stateful for offer in self._offers.values())

    def schemas(self) -> list[Json]:
        """Schemas of the tools for the chat template, in OpenAI's form."""
        return [
            {
                "type": "function",
                "function": {
                    "name": name,
                    "description": offer.tool.description,
                    "parameters": _visible(offer.tool.parameters, self._hidden.get(name, {})),
                },
            }
            for name, offer in self._offers.items()
        ]

    async def call(self, call: ToolCall, caller: ToolCaller, tokenizer: ChatTokenizer) -> Json:
        """Run `call`; returns the policy's observation: a text, or content parts with pictures if it reads some.

        Raises:
            InfraError: the tool cannot be reached.
        """
        said = await self._said(call, caller)
        # Names of files and scraped pages may have half a surrogate pair, whatever kind of tool returns them.
        if isinstance(said, str):
            return self._cut(whole(said), tokenizer)
        text = self._cut(whole(said.text), tokenizer)
        return said.content(text) if reads_pictures(tokenizer) else text

    async def _said(self, call: ToolCall, caller: ToolCaller) -> str | Pictured:
        if call.problem:
            return f"Error: {call.problem}"
        offer = self._offers.get(call.name)
        if offer is None:
            return f"Error: no tool {call.name!r}; there are {', '.join(self._offers)}"
        caller = replace(caller, given=self._hidden.get(call.name, {}))
        async with offer.slots:
            late = asyncio.timeout(offer.timeout_s)
            try:
                async with late:
                    return await offer.tool.call(call.arguments, caller)
            except ToolError as error:
                return f"Error: {error}"
            except TimeoutError as error:
                if not late.expired():  # the tool's own
                    return f"Error: {str(error) or 'TimeoutError'}"
            await offer.tool.check(caller)
            return f"Error: {call.name} timed out after {offer.timeout_s:g} s"


def _execute_kwargs(task: Task, name: str, kwargs: Json) -> Mapping[str, Json]:
    """In verl's form: `tools_kwargs: {add: {execute_kwargs: {...}}}`; `create_kwargs` count as well."""
    if not isinstance(kwargs, Mapping):
        raise UserError(
            f"task {task.task_id}: tools_kwargs.{name} is {kwargs!r:.80}, want an object"
        )
    return {**(kwargs.get("create_kwargs") or {}), **(kwargs.get("execute_kwargs") or {})}


def _visible(parameters: Mapping[str, Json], hidden: Mapping[str, Json]) -> dict[str, Json]:
    """The schema without the parameters that the task gives."""
    if not hidden:
        return dict(parameters)
    properties = {k: v for k, v in parameters.get("properties", {}).items() if k not in hidden}
    required = [name for name in parameters.get("required", ()) if name not in hidden]
    return {**parameters, "properties": properties, "required": required}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """Cuts long results: first by characters, before they are tokenised, then to the exact number of tokens."""

    tokens: int
    side: Literal["left", "middle", "right"] = "middle"
    """Which part is left out."""

    def __call__(self, text: str, tokenizer: ChatTokenizer) -> str:
        """`text`, or its beginning and end around a mark: at most `tokens` tokens."""
        length = min(len(text), self.tokens * CHARACTERS)
        shortened = self._around(text, length)
        while length and (count := len(tokenizer.encode(shortened))) > self.tokens:
            # Tokens have different lengths, so the number of characters is reduced until the text fits.
            length = min(length - 1, int(length * self.tokens / count))
            shortened = self._around(text, length)
        return shortened if length else ""

    def _around(self, text: str, length: int) -> str:
        """`length` characters of `text`, and the mark in place of the others."""
        if length >= len(text):
            return text
        match self.side:
            case "left":
                return GAP + text[len(text) - length :]
            case "right":
                return text[:length] + GAP
            case "middle":
                half = length // 2
                return text[:half] + GAP + text[len(text) - half :]


class Closable(Protocol):
    """An object with connections."""

    async def close(self) -> None:
        """Close them; idempotent."""


KEY = "rollout.program_options.tools"


class ToolBuilder:
    """The tools of one worker process: functions are loaded at once, servers with the first row."""

    def __init__(self, config: ToolsConfig, own: Sequence[ToolOffer] = ()) -> None:
        """`own` are tools of a program, before those of the recipe.

        Raises:
            ConfigError: a function that cannot be imported or described, or MCP without its package.
        """
        self._cut = Cut(tokens=config.max_result_tokens, side=config.cut)
        self._offers: list[ToolOffer] = list(own)
        self._servers: list[tuple[ToolConfig, McpServer]] = []
        self._sandboxes: list[PythonSandbox] = []
        self._retrievers: list[Closable] = []
        for where, tool in named_tools(config):
            if tool.python is not None:
                sandbox = PythonSandbox(tool)
                self._sandboxes.append(sandbox)
                # The sandbox keeps the deadline itself; if it does not, it hangs.
                late = tool.timeout_s + tool.start_timeout_s
                self._offers.append(_offered(PythonTool(sandbox, tool.name), tool, late))
                continue
            if tool.command or tool.url:
                if importlib.util.find_spec("mcp") is None:
                    raise ConfigError(
                        f"{where}: MCP servers need the extra `tools`: pip install meshrl[tools]"
                    )
                self._servers.append((tool, McpServer(tool)))
                continue
            function: Callable[..., object]
            asks = ""
            if tool.search is None:
                function = load_function(tool.function, f"{where}.function")
            elif tool.search.url:
                from meshrl.rollout.tools.search import Retriever  # with it comes httpx

                retriever = Retriever(tool.search)
                self._retrievers.append(retriever)
                function, asks = retriever.search, f"the retriever {tool.search.url}"
            else:
                function = search_function(tool.search, f"{where}.search")
            built = FunctionTool(
                function,
                name=tool.name,
                stateful=tool.stateful,
                most_lost=tool.concurrency,
                asks=asks,
            )
            self._offers.append(_offered(built, tool))
        self._toolbox: Toolbox | None = None
        self._lock = asyncio.Lock()

    async def toolbox(self) -> Toolbox:
        """All tools; servers are started or reached at the first call.

        Raises:
            ConfigError: two tools of one name, or one that a server does not have.
            InfraError: a server cannot be reached.
        """
        async with self._lock:
            if self._toolbox is None:
                offers = list(self._offers)
                for config, server in self._servers:
                    offers += [_offered(tool, config) for tool in await server.tools()]
                self._toolbox = Toolbox(offers, self._cut)
            return self._toolbox

    def release(self, uid: Uid) -> None:
        """Close the sessions of a finished row."""
        for _, server in self._servers:
            server.release(uid)
        for sandbox in self._sandboxes:
            sandbox.release(uid)

    async def close(self) -> None:
        """End all servers, sandboxes and connections; idempotent."""
        ends = [server.close() for _, server in self._servers]
        ends += [sandbox.close() for sandbox in self._sandboxes]
        ends += [retriever.close() for retriever in self._retrievers]
        if ends:  # a gather of nothing wants a loop, which a coroutine that is thrown away has not
            await asyncio.gather(*ends)


def named_tools(config: ToolsConfig) -> list[tuple[str, ToolConfig]]:
    """Each tool with its recipe key."""
    return [
        (f"{KEY}.{index}", ToolConfig(function=each) if isinstance(each, str) else each)
        for index, each in enumerate(config.tools)
    ]


def _offered(tool: Tool, config: ToolConfig, timeout_s: float = 0.0) -> ToolOffer:
    slots = asyncio.Semaphore(config.concurrency)
    return ToolOffer(tool=tool, timeout_s=timeout_s or config.timeout_s, slots=slots)
