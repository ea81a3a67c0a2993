"""Tools of MCP servers, through the official client: over stdin and stdout, or streamable HTTP.

    worker ── McpServer ─┬─ shared Connection ──────▶ one server process, or HTTP session, for all rows
                      └─ Connection per row ─────▶ one each, for stateful tools

When a server ends, closes the connection or cannot be reached, running calls get an InfraError; the next call
reconnects. After a failed attempt the next one waits, twice as long each time, and calls wait for it.
"""

from __future__ import annotations

import asyncio
import base64
import importlib
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from typing_extensions import override

from meshrl.common import process_guard
from meshrl.common.sockets import has_secret, keep_secret
from meshrl.contract.errors import ConfigError, InfraError
from meshrl.contract.types import Json, Uid
from meshrl.rollout.tools.ports import Pictured, Tool, ToolCaller, ToolConfig, ToolError

if TYPE_CHECKING:
    from mcp import Client
    from mcp.client._transport import Transport, TransportStreams
    from mcp_types import CallToolResult, ContentBlock, ListToolsResult
    from mcp_types import Tool as ListedTool

Answer = TypeVar("Answer")

log = logging.getLogger(__name__)

GRACE_S = 1.0
"""Seconds that a server has to end after SIGTERM; the library kills its guard after two."""
MOST_BYTES = 8 << 20
"""The longest answer of a server; a longer one is an error that the policy observes."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
"""Pauses between failed attempts to connect."""
FAULTS = frozenset({-32000, -32001, -32600, -32603, -32700})
"""Error codes of the connection, not of a tool: closed, timed out, session unknown, internal, not JSON."""
CLOSE_S = 10.0
"""The client gives a server 4 s to end before it is killed; the rest is for a busy machine."""


class OneLine(logging.Filter):
    """Takes tracebacks off the client library's records: one for each line of stdout that is no message."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Keep every record."""
        if record.exc_info and (error := record.exc_info[1]) is not None:
            reason = " ".join(str(error).split())[:200]
            record.msg, record.args = f"{record.getMessage()}: {reason}", ()
            record.exc_info = None
        return True


logging.getLogger("mcp.client.stdio").addFilter(OneLine())


class McpConnection:
    """One client of one server. May be opened, used and closed from any task: its own task holds it."""

    def __init__(self, config: ToolConfig, label: str) -> None:
        self._config = config
        self._label = label
        self._leave = asyncio.Event()
        self._holder: asyncio.Task[None] | None = None
        self._client: Client | None = None
        self.broken = False
        """Whether it cannot be used any more."""

    async def open(self) -> None:
        """Connect.

        Raises:
            InfraError: the server cannot be started or reached, or does not answer in time.
        """
        await asyncio.to_thread(importlib.import_module, "mcp")  # takes seconds the first time
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._holder = asyncio.create_task(self._hold(ready), name=f"mcp {self._label}")
        limit = self._config.start_timeout_s
        try:
            async with asyncio.timeout(limit):
                await ready
        except TimeoutError as error:
            await self.close()
            raise InfraError(
                f"MCP server {self._label} did not answer within {limit:g} s"
            ) from error
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Close it, and end a server that it started; idempotent."""
        self.broken = True
        self._leave.set()
        if self._holder is None:
            return
        if self._client is not None:
            await asyncio.wait({self._holder}, timeout=CLOSE_S)
        self._holder.cancel()
        await asyncio.wait({self._holder})

    async def tools(self) -> list[ListedTool]:
        """All tools of the server."""
        tools: list[ListedTool] = []
        cursor: str | None = None
        while True:
            page = await self.request(partial(_page, cursor=cursor))
            tools += page.tools
            cursor = page.next_cursor
            if not cursor:
                return tools

    async def request(self, send: Callable[[Client], Awaitable[Answer]]) -> Answer:
        """Send a request; the server's answer.

        Raises:
            ToolError: the server refuses.
            InfraError: the connection is broken.
        """
        from mcp import MCPError

        if self._client is None or self._holder is None or self.broken:
            raise self._lost("has ended")
        pending = asyncio.ensure_future(send(self._client))
        try:
            # A broken transport ends the holder task, while its requests may wait for ever.
            await asyncio.wait({pending, self._holder}, return_when=asyncio.FIRST_COMPLETED)
            if not pending.done():
                raise self._lost("closed the connection")
            return pending.result()
        except MCPError as error:
            if error.code in FAULTS:
                raise self._lost(f"failed: {error}") from error
            raise ToolError(str(error)) from error
        except Exception as error:  # the client cannot read what the server sent
            if isinstance(error, InfraError):
                raise
            raise self._lost(f"failed: {_reason(error)}") from error
        finally:
            pending.cancel()

    def _lost(self, what: str) -> InfraError:
        self.broken = True
        return InfraError(f"MCP server {self._label} {what}")

    async def _hold(self, ready: asyncio.Future[None]) -> None:
        """Enter and leave the client in one task, as its cancel scopes require."""
        from mcp import Client

        try:
            async with Client(_transport(self._config)) as self._client:
                if not ready.done():
                    ready.set_result(None)
                await self._leave.wait()
        except Exception as error:
            if not ready.done():
                verb = "be started" if self._config.command else "be reached"
                problem = f"MCP server {self._label} cannot {verb}: {_reason(error)}"
                ready.set_exception(InfraError(problem))
            elif not self._leave.is_set():
                log.warning("MCP server %s: %s", self._label, _reason(error))
        finally:
            self.broken = True


class McpServer:
    """One MCP server of a recipe: its shared connection, or one connection for each row."""

    def __init__(self, config: ToolConfig) -> None:
        self._config = config
        self.label = config.url or " ".join(config.command)
        self._connections: dict[Uid | None, McpConnection] = {}
        self._opening: dict[Uid | None, asyncio.Task[McpConnection]] = {}
        self._closing: set[asyncio.Task[Any]] = set()
        self._failures = 0

    async def tools(self) -> list[McpTool]:
        """The tools that the recipe allows.

        Raises:
            ConfigError: the server lacks a tool that the recipe names.
            InfraError: the server cannot be reached.
        """
        connection = await self._opened(None)
        limit = self._config.start_timeout_s
        try:
            async with asyncio.timeout(limit):
                listed = await connection.tools()
        except TimeoutError as error:
            self.release(None)
            raise InfraError(
                f"MCP server {self.label} did not list its tools within {limit:g} s"
            ) from error
        found = {tool.name: McpTool(self, tool) for tool in listed}
        if self._config.stateful:
            self.release(None)
        for name in self._config.only:
            if name not in found:
                known = ", ".join(found)
                raise ConfigError(f"MCP server {self.label} has no tool {name!r} (it has {known})")
        return [tool for name, tool in found.items() if name in (self._config.only or found)]

    @property
    def stateful(self) -> bool:
        """Whether each row has its own connection."""
        return self._config.stateful

    async def call(self, name: str, arguments: Mapping[str, Json], uid: Uid) -> CallToolResult:
        """Call a tool for a row. Raises what `McpConnection.request` does."""
        connection = await self._opened(uid if self.stateful else None)
        return await connection.request(lambda client: client.call_tool(name, dict(arguments)))

    async def check(self, uid: Uid) -> None:
        """After a call that timed out: find out whether the tool hangs or the server.

        Raises:
            InfraError: the server does not answer.
        """
        key = uid if self.stateful else None
        connection = await self._opened(key)
        try:
            async with asyncio.timeout(self._config.start_timeout_s):
                await connection.request(lambda client: client.list_tools(cache_mode="bypass"))
        except TimeoutError as error:
            self.release(key)
            raise InfraError(f"MCP server {self.label} does not answer any more") from error

    def release(self, key: Uid | None) -> None:
        """Close the connection of a finished row, or the shared one (None), without waiting for the server's end."""
        opening, connection = self._opening.pop(key, None), self._connections.pop(key, None)
        if opening is not None:
            opening.cancel()
            self._wait_in_close(opening)
        if connection is not None:
            self._wait_in_close(
                asyncio.create_task(connection.close(), name=f"mcp close {self.label}")
            )

    async def close(self) -> None:
        """End all connections; idempotent."""
        for key in {*self._connections, *self._opening}:
            self.release(key)
        await asyncio.gather(*self._closing, return_exceptions=True)

    def _wait_in_close(self, task: asyncio.Task[Any]) -> None:
        """Hold `task` until it is done; `close` waits for it."""
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def _opened(self, key: Uid | None) -> McpConnection:
        """The connection of a row, or the shared one (None). All callers share one attempt to reconnect."""
        connection = self._connections.get(key)
        if connection is not None and not connection.broken:
            return connection
        if key not in self._opening:
            opening = asyncio.create_task(self._open(key), name=f"mcp open {self.label}")
            self._opening[key] = opening
            opening.add_done_callback(partial(self._done_opening, key))
        return await asyncio.shield(self._opening[key])

    def _done_opening(self, key: Uid | None, task: asyncio.Task[McpConnection]) -> None:
        if self._opening.get(key) is task:
            del self._opening[key]

    async def _open(self, key: Uid | None) -> McpConnection:
        broken = self._connections.pop(key, None)
        if broken is not None:
            await broken.close()
            log.warning("MCP server %s: reconnecting", self.label)
        if self._failures:
            pause = FIRST_PAUSE_S * 2.0 ** min(self._failures - 1, 16)
            await asyncio.sleep(min(pause, LONGEST_PAUSE_S))
        connection = McpConnection(self._config, self.label)
        try:
            await connection.open()
        except InfraError:
            self._failures += 1
            raise
        self._failures = 0
        self._connections[key] = connection
        return connection


class McpTool(Tool):
    """A tool of a server."""

    def __init__(self, server: McpServer, tool: ListedTool) -> None:
        self.name = tool.name
        self.description = tool.description or ""
        self.parameters: Mapping[str, Json] = tool.input_schema
        self.stateful = server.stateful
        self._server = server

    @override
    async def call(self, arguments: Mapping[str, Json], caller: ToolCaller) -> str | Pictured:
        result = await self._server.call(self.name, {**arguments, **caller.given}, caller.uid)
        text = text_of(result)
        if result.is_error:
            raise ToolError(text)
        pictures = pictures_of(result)
        return Pictured(text=text, pictures=pictures) if pictures else text

    @override
    async def check(self, caller: ToolCaller) -> None:
        await self._server.check(caller.uid)


async def _page(client: Client, *, cursor: str | None) -> ListToolsResult:
    return await client.list_tools(cursor=cursor)


def text_of(result: CallToolResult) -> str:
    """The texts of a result, those of its resources included; other parts are replaced by what they are."""
    if not result.content and result.structured_content is not None:
        return json.dumps(result.structured_content, ensure_ascii=False)
    return "\n".join(map(_part, result.content))


def _part(part: ContentBlock) -> str:
    match part.type:
        case "text":
            return part.text
        case "resource":
            text: str | None = getattr(part.resource, "text", None)
            return f"[resource {part.resource.uri}]" if text is None else text
        case "resource_link":
            return f"[resource_link {part.name}: {part.uri}]"
        case kind:
            return f"[{kind}]"


def pictures_of(result: CallToolResult) -> tuple[bytes, ...]:
    """The pictures of a result. Raises ToolError for one that is no base64."""
    try:
        return tuple(
            base64.b64decode(each.data, validate=True)
            for each in result.content
            if each.type == "image"
        )
    except ValueError as error:
        raise ToolError(f"a picture is not base64: {error}") from error


def _transport(config: ToolConfig) -> Transport:
    from mcp.client.stdio import StdioServerParameters, stdio_client

    if config.url:
        return _http(config)
    program, *arguments = process_guard.guarded_command(
        config.command, grace_s=GRACE_S, line_bytes=MOST_BYTES
    )
    return stdio_client(
        StdioServerParameters(
            command=program,
            args=arguments,
            env=config.env,
            cwd=config.cwd,
        )
    )


@asynccontextmanager
async def _http(config: ToolConfig) -> AsyncIterator[TransportStreams]:
    from mcp.client.streamable_http import streamable_http_client
    from mcp.shared._httpx_utils import create_mcp_http_client

    if has_secret(config.url, config.headers):
        keep_secret(config.url, "a header of a tool")
    async with (
        create_mcp_http_client(headers=config.headers) as client,
        streamable_http_client(config.url, http_client=client) as streams,
    ):
        yield streams


def _reason(error: BaseException) -> str:
    """The message of `error` in one line; of a group, that of its first error."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return (str(error).strip() or type(error).__name__).splitlines()[0]
