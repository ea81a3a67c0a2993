"""An MCP server of the official package: `python mcp_server.py LOG [PORT]`, over stdin and stdout without a port."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from mcp.server import MCPServer

server = MCPServer("tests", log_level="CRITICAL")


@server.tool()
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@server.tool()
def fail() -> str:
    """Fail."""
    raise ValueError("no")


@server.tool()
async def wait() -> str:
    """Never answer."""
    await asyncio.Event().wait()
    return ""


if __name__ == "__main__":
    with Path(sys.argv[1]).open("a") as log:
        log.write(f"pid {os.getpid()}\n")
    if len(sys.argv) > 2:
        server.run("streamable-http", port=int(sys.argv[2]))
    else:
        server.run()
