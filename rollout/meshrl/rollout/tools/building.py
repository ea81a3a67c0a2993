"""Builds the `tools` of a recipe: Python functions, the tools of MCP servers, `python` and `search`."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Callable
from typing import Protocol

from meshrl.contract.errors import ConfigError
from meshrl.contract.types import Uid
from meshrl.rollout.tools.config import ToolConfig, ToolsConfig
from meshrl.rollout.tools.functions import FunctionTool
from meshrl.rollout.tools.mcp_servers import McpServer
from meshrl.rollout.tools.ports import Tool
from meshrl.rollout.tools.python_sandbox import PythonSandbox, PythonTool
from meshrl.rollout.tools.search import search_function
from meshrl.rollout.tools.toolbox import Cut, Toolbox, ToolOffer
from meshrl.rollout.user_functions import load_function


class Closable(Protocol):
    """Has connections."""

    async def close(self) -> None:
        """Close them; idempotent."""


KEY = "rollout.program_options.tools"


class ToolBuilder:
    """The tools of one worker process: functions are loaded at once, servers with the first row."""

    def __init__(self, config: ToolsConfig) -> None:
        """Raises ConfigError for a function that cannot be imported or described, or MCP without its package."""
        self._cut = Cut(tokens=config.max_result_tokens, side=config.cut)
        self._offers: list[ToolOffer] = []
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
                from meshrl.rollout.tools.retriever import Retriever  # with it comes httpx

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
        """A row is done: close its own sessions."""
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
