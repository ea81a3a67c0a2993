"""The server behind the engine, whoever started it: a child that can be replaced, or a `url` that can be asked."""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from meshrl.contract.errors import ConfigError, MeshError, UnavailableError, UserError
from meshrl.contract.types import OnUpdate, Version
from meshrl.rollout.engines._server.checkpoint import Checkpoint
from meshrl.rollout.engines._server.config import ServerConfig
from meshrl.rollout.engines._server.request import Ask
from meshrl.rollout.engines._server.response import Chunk
from meshrl.rollout.engines._server.server_process import Server

log = logging.getLogger(__name__)

START_S, URL_START_S = 900.0, 10.0
HEALTH_S = 10.0
LOOK_S = 0.2
REPORT_S = 15.0


class Client(Protocol):
    """Speaks to one server."""

    @property
    def url(self) -> str:
        """Where it listens."""
        ...

    async def close(self) -> None:
        """Free the connections."""
        ...

    async def healthy(self, wait_s: float) -> bool:
        """Whether server and engine answer within `wait_s`."""
        ...

    async def label(self) -> str:
        """The version's label that the server stamps on tokens now. Raises MeshError."""
        ...

    async def cache_tokens(self) -> int:
        """Tokens that the server's KV cache holds; 0 where it does not say."""
        ...

    async def load(self, directory: Path, version: Version, on_update: OnUpdate) -> None:
        """Serve the weights in `directory` as `version`; what runs is treated as `on_update` says.

        Raises:
            MeshError: at any point; the server must then be taken for half loaded.
        """
        ...

    def generate(self, request_id: str, ask: Ask, salt: str) -> AsyncGenerator[Chunk, None]:
        """Stream one response; leaving it aborts the request. `salt` keeps prefix caches of versions apart.

        Raises:
            UserError: the server refuses the request.
            InfraError: the server failed, went away or kept silent.
        """
        ...

    async def abort(self, request_id: str) -> None:
        """End a request; its stream gets a last chunk."""
        ...


C = TypeVar("C", bound=Client)


class Kind(Protocol[C]):
    """What one kind of server is: how it is started, how it is spoken to."""

    name: str
    """As people say it."""
    package: str
    """What its environment can import."""
    module: tuple[str, ...]
    """Arguments of its environment's interpreter."""
    plugin: Path
    """A folder for its PYTHONPATH."""

    def arguments(
        self, checkpoint: Checkpoint, *, max_length: int, slots: int, port: str
    ) -> Sequence[str]:
        """Of a server that is started."""
        ...

    def environment(self) -> Mapping[str, str]:
        """Of a server that is started; `rollout.engine.env` comes on top."""
        ...

    def client(self, url: str) -> C:
        """Speaks to the server there."""
        ...

    async def check(self, client: C, checkpoint: Checkpoint, max_length: int) -> None:
        """Ask a server that is up for everything that generation and updates will need.

        Raises:
            UserError: naming the option that it was started without, or its limit below `max_length`.
        """
        ...


class Host:
    """One server at a time, and the client that speaks to it."""

    def __init__(self, kind: Kind[Any], config: ServerConfig, *, slots: int) -> None:
        """Checks that a server can be had, and has none yet. Raises ConfigError."""
        self._kind = kind
        self._config = config
        self._slots = slots
        self._command = _command(kind, config)
        self._server: Server | None = None
        self._client: Client | None = None
        self._was_up = False
        self.cache_tokens = 0
        """What the server's KV cache holds; 0 where it does not say."""

    @property
    def name(self) -> str:
        """What kind of server it is."""
        return self._kind.name

    @property
    def client(self) -> Client:
        """Speaks to the server of now. Raises UnavailableError when there is none."""
        if self._client is None:
            raise UnavailableError("the engine is not started")
        return self._client

    @property
    def replaceable(self) -> bool:
        """The server is a child."""
        return bool(self._command)

    async def start(self, checkpoint: Checkpoint, max_length: int) -> None:
        """Have a server that is ready and fit for the mesh.

        Raises:
            UserError: it does not start, does not answer, or lacks an option; says what and where.
        """
        await self.close()
        url = self._config.url or f"http://127.0.0.1:{_free_port()}"
        client = self._client = self._kind.client(url)
        try:
            if self._command:
                self._server = await self._child(checkpoint, max_length, url.rpartition(":")[2])
            # A wrong `url` is told soon; a server that was there before may take its time to come back.
            patience = START_S if self._command or self._was_up else URL_START_S
            await self._ready(self._config.start_s or patience)
            await self._kind.check(client, checkpoint, max_length)
            self.cache_tokens = await client.cache_tokens()
            log.info("%s at %s: %s", self.name, url, _room(self.cache_tokens))
            self._was_up = True
        except BaseException:
            await self.close()
            raise

    async def ended(self) -> None:
        """Return when a child has ended; never for a `url`."""
        if self._server is None:
            await asyncio.get_running_loop().create_future()
        else:
            await self._server.ended()

    async def serves(self, label: str | None) -> bool:
        """Whether the server lives and says that its weights are `label` (None: whatever they are)."""
        client, server = self._client, self._server
        if client is None or (server is not None and server.exit_code is not None):
            return False
        try:
            return await client.healthy(HEALTH_S) and label in (None, await client.label())
        except MeshError:
            return False

    def last_words(self) -> str:
        """Why a child ended, if one did."""
        server = self._server
        if server is None or server.exit_code is None:
            return "it does not answer"
        return f"exit code {server.exit_code}: {server.last_words()} (log: {server.log})"

    async def close(self) -> None:
        """End a child, leave a `url` as it is; idempotent."""
        server, self._server = self._server, None
        client, self._client = self._client, None
        if client is not None:
            await client.close()
        if server is not None:
            await server.stop()

    async def _child(self, checkpoint: Checkpoint, max_length: int, port: str) -> Server:
        kind, config = self._kind, self._config
        arguments = kind.arguments(checkpoint, max_length=max_length, slots=self._slots, port=port)
        environment = {**kind.environment(), **config.env}
        paths = (str(kind.plugin), environment.get("PYTHONPATH", ""))
        environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
        path = config.log or Path(tempfile.gettempdir()) / f"meshrl-{kind.package}-{port}.log"
        server = Server([*self._command, *arguments], environment, path)
        await server.start()
        log.info("%s starts on port %s, log %s", kind.name, port, path)
        return server

    async def _ready(self, wait_s: float) -> None:
        """Return once the server answers.

        Raises:
            UserError: it ended first (with the log's last error), or was not ready within `wait_s`.
        """
        client, server, name = self.client, self._server, self.name
        began = reported = time.monotonic()
        while not await client.healthy(wait_s=5.0):
            if server is not None and server.exit_code is not None:
                raise UserError(
                    f"{name} ended with exit code {server.exit_code} before it was ready: {server.last_words()} "
                    f"(log: {server.log})"
                )
            now = time.monotonic()
            if now - began > wait_s:
                where = (
                    f"the log {server.log} ends: {server.last_words()}" if server else "is it up?"
                )
                raise UserError(
                    f"no {name} server answers at {client.url} within {wait_s:g} s; {where}"
                )
            if now - reported > REPORT_S:
                waits_for = server.last_words() if server else client.url
                log.info("%s starts since %.0f s: %s", name, now - began, waits_for)
                reported = now
            await asyncio.sleep(LOOK_S)  # another program's start has no event to wait for


def _command(kind: Kind[Any], config: ServerConfig) -> tuple[str, ...]:
    """What starts a child; empty for a `url`."""
    given = [key for key in ("url", "python", "command") if getattr(config, key)]
    if len(given) > 1:
        raise ConfigError(f"rollout.engine: want one of {' and '.join(given)}, got both")
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


def _room(cache_tokens: int) -> str:
    if not cache_tokens:
        return "it does not say how many tokens its cache holds, rows are leased by slots"
    return f"its cache holds {cache_tokens} tokens"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port
