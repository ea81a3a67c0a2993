"""The systems compared: the transfer queue on each of its stores, the peer, and gRPC with nothing behind it."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from system import HERE, Child, ChildFailed, System

ROOT = HERE.parents[1]
PEER_PYTHON = ROOT / ".venv-peer-queue" / "bin" / "python"


@asynccontextmanager
async def ours(
    store: str, folder: Path, seed: int, tuning: dict[str, Any]
) -> AsyncIterator[System]:
    """A queue service on `store`, and its clients."""
    section: dict[str, Any] = {"store": store, "durability": "always"}
    redis = None
    if store == "redis":
        redis, section["redis_url"] = await start_redis(folder / "redis")
        section["durability"] = "none"  # the server's own appendfsync, everysec, holds
    parts = {"server": [redis.pid]} if redis else {}
    server = [
        sys.executable,
        str(HERE / "ours_server.py"),
        str(folder / store),
        json.dumps(section),
    ]
    client = [sys.executable, str(HERE / "ours_client.py"), "{address}"]
    try:
        async with System(server, client, seed, tuning, parts) as system:
            yield system
    finally:
        if redis:
            redis.kill()
            await redis.close()


@asynccontextmanager
async def floor(folder: Path, seed: int, tuning: dict[str, Any]) -> AsyncIterator[System]:
    """As many calls and bytes as ours, over gRPC; see floor_server.py."""
    server = [sys.executable, str(HERE / "floor_server.py")]
    client = [sys.executable, str(HERE / "floor_client.py"), "{address}"]
    async with System(server, client, seed, tuning) as system:
        yield system


@asynccontextmanager
async def peer(folder: Path, seed: int, tuning: dict[str, Any]) -> AsyncIterator[System]:
    """TransferQueue on its SimpleStorage, and its clients."""
    config = str(folder / "config.pickle")
    python = str(PEER_PYTHON)
    server = [python, str(HERE / "peer_server.py"), config, str(tuning["units"])]
    client = [python, str(HERE / "peer_client.py"), config]
    async with System(server, client, seed, tuning) as system:
        yield system


async def start_redis(folder: Path) -> tuple[Child, str]:
    """A redis-server with an append-only file, fsynced every second; answers its process and its URL."""
    command, port = redis_command(folder)
    child = await Child.start("redis", command)
    while True:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except ConnectionRefusedError:
            await asyncio.sleep(0.05)
        else:
            writer.close()
            return child, f"redis://127.0.0.1:{port}/0"


def redis_command(folder: Path) -> tuple[list[str], int]:
    """The command that starts a server on a free port, its files in `folder`."""
    program = shutil.which("redis-server")
    if program is None:
        raise ChildFailed("no redis-server (apt-get install redis-server); --store leaves it out")
    folder.mkdir(parents=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = {
        "port": str(port),
        "bind": "127.0.0.1",
        "dir": str(folder),
        "save": "",
        "appendonly": "yes",
        "appendfsync": "everysec",
        "logfile": str(folder / "log"),
    }
    words = [word for name, value in options.items() for word in (f"--{name}", value)]
    return [program, *words], port
