"""Builds what a recipe's `tools` name: Python functions, and the tools of MCP servers."""

from __future__ import annotations

import asyncio
import importlib.util

from meshrl.contract.errors import ConfigError
from meshrl.contract.types import Uid
from meshrl.rollout.tools.config import ToolConfig, ToolsConfig
from meshrl.rollout.tools.functions import FunctionTool
from meshrl.rollout.tools.mcp_servers import McpServer
from meshrl.rollout.tools.ports import Tool
from meshrl.rollout.tools.toolbox import Offered, Toolbox
from meshrl.rollout.tools.truncation import Cut
from meshrl.rollout.user_functions import load_function

KEY = "rollout.program_options.tools"


class ToolBuilder:
    """The tools of one worker process: functions at once, servers once they are asked."""

    def __init__(self, config: ToolsConfig) -> None:
        """Raises ConfigError for a function that cannot be imported or described, and for MCP without its package."""
        self._cut = Cut(tokens=config.max_result_tokens, side=config.cut)
        self._offers: list[Offered] = []
        self._servers: list[tuple[ToolConfig, McpServer]] = []
        for where, tool in named_tools(config):
            if not tool.function:
                if importlib.util.find_spec("mcp") is None:
                    raise ConfigError(
                        f"{where}: MCP servers need the extra `tools`: pip install meshrl[tools]"
                    )
                self._servers.append((tool, McpServer(tool)))
                continue
            function = load_function(tool.function, f"{where}.function")
            made = FunctionTool(
                function, name=tool.name, stateful=tool.stateful, most_lost=tool.concurrency
            )
            self._offers.append(_offered(made, tool))
        self._toolbox: Toolbox | None = None
        self._one_asks = asyncio.Lock()

    async def toolbox(self) -> Toolbox:
        """All tools; servers are started or reached at the first call.

        Raises:
            ConfigError: two tools of one name, or one that a server does not have.
            InfraError: a server cannot be reached.
        """
        async with self._one_asks:
            if self._toolbox is None:
                found = list(self._offers)
                for config, server in self._servers:
                    found += [_offered(tool, config) for tool in await server.tools()]
                self._toolbox = Toolbox(found, self._cut)
            return self._toolbox

    def release(self, uid: Uid) -> None:
        """A row is done: sessions that were its own end."""
        for _, server in self._servers:
            server.release(uid)

    async def close(self) -> None:
        """End all servers; idempotent."""
        await asyncio.gather(*(server.close() for _, server in self._servers))


def named_tools(config: ToolsConfig) -> list[tuple[str, ToolConfig]]:
    """Each tool with the key that it stands under."""
    return [
        (f"{KEY}.{index}", ToolConfig(function=each) if isinstance(each, str) else each)
        for index, each in enumerate(config.tools)
    ]


def _offered(tool: Tool, config: ToolConfig) -> Offered:
    places = asyncio.Semaphore(config.concurrency)
    return Offered(tool=tool, timeout_s=config.timeout_s, places=places)
