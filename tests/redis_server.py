"""Real Redis or Valkey servers for tests: on unix sockets in a temporary folder, ended with the test.

`REDIS_SERVER=/path/of/valkey-server pytest ...` runs the tests on that server.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis

PROGRAM = shutil.which(os.environ.get("REDIS_SERVER", "redis-server")) or shutil.which(
    "valkey-server"
)
needs_redis = pytest.mark.skipif(PROGRAM is None, reason="no redis-server on this machine (apt)")
START_S = 20.0


class RedisServer:
    """One server with its folder; may be killed and started again."""

    def __init__(self, folder: Path, *options: str) -> None:
        # A socket's path holds 107 characters; pytest's folders can be longer.
        folder.mkdir(parents=True, exist_ok=True)
        self.socket = folder / "s"
        assert len(str(self.socket)) < 107, self.socket
        self.url = f"unix://{self.socket}"
        self._folder = folder
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, *options: str) -> None:
        """Return once it answers; `options` are for this start only."""
        self.socket.unlink(missing_ok=True)
        self._process = subprocess.Popen(
            [
                str(PROGRAM),
                "--port",
                "0",
                "--unixsocket",
                str(self.socket),
                "--dir",
                str(self._folder),
                "--save",
                "",
                "--appendonly",
                "yes",
                "--appendfsync",
                "everysec",
                "--repl-diskless-sync-delay",
                "0",
                "--logfile",
                "log",
                *self._options,
                *options,
            ]
        )
        until = time.monotonic() + START_S
        with self.client() as client:
            while True:
                try:
                    client.ping()
                    return
                except redis.exceptions.ConnectionError:
                    assert self._process.poll() is None, (self._folder / "log").read_text()
                    assert time.monotonic() < until, "redis-server does not answer"
                    time.sleep(0.01)

    def kill(self, number: int = signal.SIGKILL) -> None:
        """End it and wait for that."""
        if self._process is not None:
            self._process.send_signal(number)
            self._process.wait()
            self._process = None

    def signal(self, number: int) -> None:
        """Send it, if it runs."""
        if self._process is not None:
            self._process.send_signal(number)

    def client(self) -> redis.Redis:
        """A blocking client, for the test's own questions."""
        return redis.Redis(unix_socket_path=str(self.socket), decode_responses=True)


@contextmanager
def running(folder: Path, *options: str) -> Iterator[RedisServer]:
    server = RedisServer(folder, *options)
    server.start()
    try:
        yield server
    finally:
        server.kill()
