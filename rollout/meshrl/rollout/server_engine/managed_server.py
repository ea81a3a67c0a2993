"""The server of one engine: a child process that can be replaced, or a server of another program at a `url`."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import logging
import os
import secrets
import shutil
import socket
import sys
import tempfile
import time
from pathlib import Path

import httpx

from meshrl.common.device_share import DeviceShare
from meshrl.contract.errors import (
    ConfigError,
    EngineGoneError,
    InfraError,
    MeshError,
    UnauthenticatedError,
    UserError,
)
from meshrl.rollout.server_engine.checkpoint import Checkpoint
from meshrl.rollout.server_engine.config import ServerConfig
from meshrl.rollout.server_engine.kind import AnyServerKind, ServerClient
from meshrl.rollout.server_engine.server_process import ServerProcess

log = logging.getLogger(__name__)

START_S, URL_START_S = 900.0, 10.0
HEALTH_S = 10.0
LAST_WORDS_S = 5.0
"""How long a server that broke a connection may take to end."""
POLL_S = 0.2
REPORT_S = 15.0


class ManagedServer:
    """One server at a time, and the client that speaks to it."""

    def __init__(self, kind: AnyServerKind, config: ServerConfig, *, slots: int) -> None:
        """Check the options that say where the server is; start nothing yet. Raises ConfigError."""
        self._kind = kind
        self._config = config
        self._slots = slots
        self._command = _command(kind, config)
        self._process: ServerProcess | None = None
        self._client: ServerClient | None = None
        self._was_up = False
        self.cache_tokens = 0
        """Tokens that the server's KV cache holds; 0 where the server does not report it."""

    @property
    def name(self) -> str:
        """The kind of server, for messages."""
        return self._kind.name

    @property
    def client(self) -> ServerClient:
        """The client of the current server. Raises EngineGoneError when there is none."""
        if self._client is None:
            raise EngineGoneError("the engine is not started")
        return self._client

    @property
    def replaceable(self) -> bool:
        """The server is a child process of this one."""
        return bool(self._command)

    async def start(self, checkpoint: Checkpoint, max_length: int) -> None:
        """Start or find the server and wait until it is ready and passes the check of its kind.

        Raises:
            UserError: it does not start, does not answer, or lacks an option; the message says which.
        """
        await self.close()
        url = self._config.url or f"http://127.0.0.1:{_free_port()}"
        key = self._config.env.get(self._kind.key_name) or os.environ.get(self._kind.key_name)
        if key is None and self._command:
            key = secrets.token_urlsafe(32)
        client = self._client = self._kind.client(url, key)
        try:
            if self._command:
                self._process = await self._start_child(
                    checkpoint, max_length, url.rpartition(":")[2], key or ""
                )
            # A typo in `url` fails early; a server that has answered before may take long to come back.
            deadline_s = START_S if self._command or self._was_up else URL_START_S
            await self._ready(self._config.start_s or deadline_s)
            try:
                await self._kind.check(client, checkpoint, max_length)
            except UnauthenticatedError as error:
                where = f"set {self._kind.key_name} in rollout.engine.env or the environment"
                raise UserError(f"{error}: {where}") from error
            self.cache_tokens = await client.cache_tokens()
            log.info("%s at %s: %s", self.name, url, _cache_message(self.cache_tokens))
            self._was_up = True
        except BaseException:
            await self.close()
            raise

    async def ended(self) -> None:
        """Return when the child process has ended; never for a `url`."""
        if self._process is None:
            await asyncio.get_running_loop().create_future()
        else:
            await self._process.ended()

    async def serves(self, label: str | None) -> bool:
        """Whether the server answers and reports the weights `label` (None: any weights)."""
        client, process = self._client, self._process
        if client is None or (process is not None and process.exit_code is not None):
            return False
        try:
            return await client.healthy(HEALTH_S) and label in (None, await client.label())
        except MeshError:
            return False

    def exit_reason(self) -> str:
        """Why the child process ended; that it does not answer, where it still runs."""
        process = self._process
        if process is None or process.exit_code is None:
            return "it does not answer"
        return f"exit code {process.exit_code}: {process.last_error()} (log: {process.log})"

    async def last_words(self, error: Exception) -> str:
        """Why the child process ended, to add to `error` of a broken connection; empty where it goes on."""
        process = self._process
        if process is None or not isinstance(error.__cause__, httpx.TransportError):
            return ""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_WORDS_S):
                await process.ended()
        return "" if process.exit_code is None else f"; {self.exit_reason()}"

    async def close(self) -> None:
        """End the child process; a server at a `url` is left running.

        Idempotent; a call that is cancelled leaves the process to the next one.
        """
        client, self._client = self._client, None
        if client is not None:
            await client.close()
        if self._process is not None:
            await self._process.stop()
            self._process = None

    async def _start_child(
        self, checkpoint: Checkpoint, max_length: int, port: str, key: str
    ) -> ServerProcess:
        kind, config = self._kind, self._config
        arguments = kind.arguments(checkpoint, max_length=max_length, slots=self._slots, port=port)
        environment = {**kind.environment(), **config.env, kind.key_name: key}
        paths = (str(kind.plugin or ""), environment.get("PYTHONPATH", ""))
        environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
        path = config.log or Path(tempfile.gettempdir()) / f"meshrl-{kind.package}-{port}.log"
        process = ServerProcess([*self._command, *arguments], environment, path)
        await process.start()
        log.info("%s starts on port %s, log %s", kind.name, port, path)
        return process

    async def _ready(self, wait_s: float) -> None:
        """Return once the server answers.

        Raises:
            UserError: it ended first (with the log's last error), or was not ready within `wait_s`.
        """
        client, process, name = self.client, self._process, self.name
        began = reported = time.monotonic()
        while not await client.healthy(wait_s=5.0):
            if process is not None and process.exit_code is not None:
                raise UserError(
                    f"{name} ended with exit code {process.exit_code} before it was ready: {process.last_error()} "
                    f"(log: {process.log})"
                )
            now = time.monotonic()
            if now - began > wait_s:
                where = (
                    f"the log {process.log} ends: {process.last_error()}"
                    if process
                    else "is it running?"
                )
                raise UserError(
                    f"no {name} server answers at {client.url} within {wait_s:g} s; {where}"
                )
            if now - reported > REPORT_S:
                detail = process.last_error() if process else client.url
                log.info("%s has been starting for %.0f s: %s", name, now - began, detail)
                reported = now
            await asyncio.sleep(POLL_S)  # another program's start has no event to wait for


def _command(kind: AnyServerKind, config: ServerConfig) -> tuple[str, ...]:
    """The command that starts a child process, without its arguments; empty for a `url`."""
    set_keys = [key for key in ("url", "python", "command") if getattr(config, key)]
    if len(set_keys) > 1:
        raise ConfigError(f"rollout.engine: want one of {' and '.join(set_keys)}, got both")
    if config.url:
        if not config.url.startswith(("http://", "https://")):
            raise ConfigError(
                f"rollout.engine.url is {config.url!r}, want one such as http://127.0.0.1:8000"
            )
        return ()
    if config.command:
        if shutil.which(config.command[0]) is None:
            raise ConfigError(f"rollout.engine.command: there is no program {config.command[0]!r}")
        return tuple(config.command)
    if config.python:
        if shutil.which(config.python) is None:
            raise ConfigError(f"rollout.engine.python: {config.python} is no program")
        return (str(config.python), *kind.module)
    if importlib.util.find_spec(kind.package) is None:
        raise ConfigError(
            f"rollout.engine: {kind.name} is not installed here; give `python`, the interpreter of an environment "
            "that has it, or the `url` of a running server"
        )
    return (sys.executable, *kind.module)


def _cache_message(cache_tokens: int) -> str:
    if not cache_tokens:
        return "it does not report how many tokens its cache holds, so rows are leased by slots"
    return f"its cache holds {cache_tokens} tokens"


def _free_port() -> int:
    """A free port, of those that the placement gives where there is one."""
    share = DeviceShare.of()
    given = share.ports if share is not None else ()
    for wanted in (*given, 0):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", wanted))
            port: int = probe.getsockname()[1]
            return port
    raise InfraError("no port of 127.0.0.1 is free")
