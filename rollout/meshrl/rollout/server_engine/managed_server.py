"""The server of one engine: a child process that can be replaced, or a server of another program at a `url`."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import logging
import os
import re
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

import httpx

from meshrl.common import device_lease, process_guard
from meshrl.common.device_lease import DeviceShare
from meshrl.common.python_process import spared
from meshrl.contract.errors import (
    ConfigError,
    EngineGoneError,
    InfraError,
    MeshError,
    UnauthenticatedError,
    UserError,
)
from meshrl.rollout.server_engine.checkpoint import CheckpointFacts
from meshrl.rollout.server_engine.config import ServerConfig
from meshrl.rollout.server_engine.kind import AdapterClient, AnyServerKind, ServerClient

GRACE_S = 5.0
"""Seconds that a server has to end."""
STOP_S = 30.0
"""The guard kills what has not ended in `GRACE_S`; the rest is for a busy machine."""
TAIL_BYTES = 64 << 10
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_LOG_PREFIX = re.compile(
    r"^(\(\w[^)]*\)\s*)?((ERROR|WARNING|INFO)\s+\S+\s+\S+\s+(\[[^\]]*\])?\s*)?"
)
_FAULT = re.compile(r"^([\w.]*(Error|Exception|Interrupt)\b.*|.*\berror: .*|.*No module named .*)")
_SEE_ABOVE = re.compile(r"root cause|Engine core initialization failed|WorkerProc initialization")


class ServerProcess:
    """One process group, from `start` to `stop`. It cannot outlive this process; its log is read when it fails."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self._command = tuple(command)
        self._environment = dict(environment)
        self._log = log
        self._process: asyncio.subprocess.Process | None = None

    @property
    def log(self) -> Path:
        """The file with the server's output."""
        return self._log

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.returncode if self._process else None

    async def start(self) -> None:
        """Run the command under a process guard, which ends it when this process ends.

        Raises:
            InfraError: the log cannot be written, or no process started.
        """
        try:
            self._log.parent.mkdir(parents=True, exist_ok=True)
            with _private(self._log) as log:
                self._process = await asyncio.create_subprocess_exec(
                    *process_guard.guarded_command(self._command, grace_s=GRACE_S, log=self._log),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=self._environment,
                    start_new_session=True,
                    pass_fds=device_lease.inherited(),
                )
        except OSError as error:
            raise InfraError(f"cannot start {self._command[0]}: {error}") from error

    async def ended(self) -> int:
        """Wait for the end of the process, kill what is left of its group, return its exit code."""
        if self._process is None:
            raise InfraError("the server was not started")
        code = await self._process.wait()
        with contextlib.suppress(ProcessLookupError):  # the group is empty
            os.killpg(self._process.pid, signal.SIGKILL)
        return code

    async def stop(self) -> None:
        """End the whole process group; idempotent.

        Raises:
            InfraError: the guard itself does not end.
        """
        process = self._process
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            async with asyncio.timeout(STOP_S):
                await self.ended()
        except TimeoutError as error:
            os.killpg(process.pid, signal.SIGKILL)
            raise InfraError(
                f"the server (pid {process.pid}) did not end within {STOP_S:g} s"
            ) from error

    def last_error(self) -> str:
        """The line of the log that best explains why the server failed."""
        return last_error(_tail(self._log))


def last_error(text: str) -> str:
    """The last line of `text` that names an error itself (no "see above"), else its last line."""
    lines = [_LOG_PREFIX.sub("", _COLOUR.sub("", line)).strip() for line in text.splitlines()]
    lines = [line for line in lines if line]
    faults = [line for line in lines if _FAULT.match(line)]
    causes = [line for line in faults if not _SEE_ABOVE.search(line)]
    return (causes or faults or lines or ["it wrote nothing"])[-1]


def _private(path: Path) -> BinaryIO:
    """An empty file, closed to other users: servers log their arguments, a key among them. No link is followed."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
    file = os.fdopen(os.open(path, flags, 0o600), "wb")
    os.fchmod(file.fileno(), 0o600)
    return file


def _tail(path: Path) -> str:
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - TAIL_BYTES))
            return file.read().decode(errors="replace")
    except OSError as error:
        return f"OSError: {error}"


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
        self._adapters: dict[str, Path] = {}
        """Adapters that a server has beside its versions, by their names."""
        self.cache_tokens = 0
        """Tokens that the server's KV cache holds; 0 where the server does not report it."""

    @property
    def name(self) -> str:
        """The kind of server, for messages."""
        return self._kind.name

    @property
    def where(self) -> str:
        """The server and its log, for messages."""
        at = f" at {self._client.url}" if self._client is not None else ""
        kept = f" (log: {self._process.log})" if self._process is not None else ""
        return f"{self.name}{at}{kept}"

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

    async def start(self, checkpoint: CheckpointFacts, max_length: int) -> None:
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
            for name, directory in self._adapters.items():
                try:
                    await _of_adapters(client).load_adapter(name, directory)
                except MeshError as error:  # its files are gone: later requests get this error
                    log.warning("%s starts without an adapter: %s", self.name, error)
            self.cache_tokens = await client.cache_tokens()
            log.info("%s at %s: %s", self.name, url, _cache_message(self.cache_tokens))
            self._was_up = True
        except BaseException:
            await self.close()
            raise

    async def add_adapter(self, directory: Path) -> str:
        """Have this server and its successors serve what is in `directory`; its name there. Raises MeshError."""
        name = f"beside-{uuid.uuid4().hex}"
        await _of_adapters(self.client).load_adapter(name, directory)
        self._adapters[name] = directory
        return name

    async def remove_adapter(self, name: str) -> None:
        """Remove adapter `name`, which no request names any more."""
        self._adapters.pop(name, None)
        with contextlib.suppress(MeshError):  # the server makes room by itself
            await _of_adapters(self.client).unload_adapter(name)

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
        """Why the child process ended, to add to `error` of a broken connection; empty where it continues."""
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
        self, checkpoint: CheckpointFacts, max_length: int, port: str, key: str
    ) -> ServerProcess:
        kind, config = self._kind, self._config
        arguments = kind.arguments(checkpoint, max_length=max_length, slots=self._slots, port=port)
        environment = {**kind.environment(), **config.env, kind.key_name: key}
        environment, left_out = spared(environment, *config.env)
        if left_out:
            log.warning("%s starts without %s", kind.name, ", ".join(left_out))
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


def _of_adapters(client: ServerClient) -> AdapterClient:
    if not isinstance(client, AdapterClient):
        raise UserError(f"the server at {client.url} serves no adapters")
    return client


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
            raise ConfigError(f"rollout.engine.python: {config.python} is not a program")
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
