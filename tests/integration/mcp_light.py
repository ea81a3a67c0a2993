"""An MCP server of the standard library alone, so that it starts at once: `python -E -S mcp_light.py LOG [mute]`.

The log gets a line with the server's pid at its start, and one for some calls. A mute one lists no tools.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

LOG = Path(sys.argv[1])
NUMBERS = {"a": {"type": "integer"}, "b": {"type": "integer"}}
TOOLS = {
    "add": NUMBERS,
    "add_or_wait": NUMBERS,
    "tick": {},
    "wait": {},
    "stop": {},
    "die": {},
    "fork": {"count": {"type": "integer"}},
    "long": {"n": {"type": "integer"}},
    "draw": {"data": {"type": "string"}},
}
ticks = 0


def note(text: str) -> None:
    with LOG.open("a") as log:
        log.write(text + "\n")


def call(name: str, given: dict[str, Any]) -> str | None:
    """None: no answer."""
    global ticks
    match name:
        case "add":
            return str(given["a"] + given["b"])
        case "add_or_wait":  # the first call of all is never answered
            first = "called" not in LOG.read_text()
            note(f"called {given['a']} {given['b']}")
            return None if first else str(given["a"] + given["b"])
        case "tick":
            ticks += 1
            return str(ticks)
        case "wait":
            return None
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "die":
            os.kill(os.getpid(), signal.SIGKILL)
        case "fork":
            sleep = [sys.executable, "-E", "-S", "-c", "import time; time.sleep(600)"]
            for _ in range(given["count"]):
                note(f"child {subprocess.Popen(sleep, start_new_session=True).pid}")
            return "forked"
        case "long":
            return "x" * int(given["n"])
    return ""


def answer(method: str, params: dict[str, Any]) -> dict[str, Any] | None:
    match method:
        case "initialize":
            about = {"name": "light", "version": "1"}
            version = params["protocolVersion"]
            return {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": about}
        case "tools/list" if "mute" in sys.argv:
            return None
        case "tools/list":
            schema = {"type": "object"}
            tools = [
                {"name": name, "inputSchema": schema | {"properties": properties}}
                for name, properties in TOOLS.items()
            ]
            return {"tools": tools}
        case "tools/call":
            given = params.get("arguments") or {}
            if params["name"] == "draw":
                image = {"type": "image", "data": given["data"], "mimeType": "image/png"}
                return {"content": [{"type": "text", "text": "the board"}, image]}
            text = call(params["name"], given)
            return None if text is None else {"content": [{"type": "text", "text": text}]}
    return {"error": {"code": -32601, "message": f"no method {method}"}}


if __name__ == "__main__":
    note(f"pid {os.getpid()}")
    for line in sys.stdin:
        request = json.loads(line)
        if "id" not in request:
            continue
        result = answer(request["method"], request.get("params") or {})
        if result is not None:
            body = result if "error" in result else {"result": result}
            print(json.dumps({"jsonrpc": "2.0", "id": request["id"]} | body), flush=True)
