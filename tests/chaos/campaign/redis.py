"""A Redis server under the queue's store, to be killed like anybody else. It keeps an append-only file."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Final

from ...redis_server import PROGRAM, RedisServer


class Redis:
    """One server on a socket in `folder`."""

    name: Final = "redis"

    def __init__(self, folder: Path) -> None:
        """Raises PermissionError where there is no redis-server."""
        if PROGRAM is None:
            raise PermissionError("no redis-server on this machine")
        self._server = RedisServer(folder, "--appendfsync", "always")
        self.url = self._server.url
        self.alive = False

    def start(self) -> None:
        """Return once it answers."""
        self._server.start()
        self.alive = True

    def kill(self) -> None:
        """SIGKILL; what it had written to its file stays."""
        self._server.kill()
        self.alive = False

    def signal(self, number: signal.Signals) -> None:
        """Send it, if it lives."""
        self._server.signal(number)
