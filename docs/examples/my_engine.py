"""A kind of engine server of one's own, in one file: put it on the PYTHONPATH and set `rollout.name: my_engine`.

A name with a dot in it is a module from anywhere (`my_package.my_engine`). The server of this example speaks four
routes of SGLang; `python -m meshrl.testing.sglang_server` is one that runs without a GPU.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path
from typing import Any

from meshrl.common.config import read_options
from meshrl.contract.types import OnUpdate, Version
from meshrl.rollout.server_engine.checkpoint import CheckpointFacts
from meshrl.rollout.server_engine.config import ServerConfig
from meshrl.rollout.server_engine.engine import ServerEngine
from meshrl.rollout.server_engine.http import HttpClient
from meshrl.rollout.server_engine.kind import check_max_length
from meshrl.rollout.server_engine.request import ServerRequest
from meshrl.rollout.server_engine.response import Chunk
from meshrl.rollout.tokenizer import Tokenizer


class Config(ServerConfig):
    """Options under `rollout.engine`; `url`, `python`, `command` and the like are inherited."""

    pause_mode: str = "retract"
    """The server's treatment of running requests during an update."""


def build(
    config: Mapping[str, object], *, model: Path, slots: int, tokenizer: Tokenizer | None = None
) -> ServerEngine:
    """Called with the recipe's `rollout.engine`."""
    options = read_options(Config, config, where="rollout.engine")
    kind = MyServer(options)
    return ServerEngine(kind, options, model=model, slots=slots, tokenizer=tokenizer)


class MyServer:
    """How the server is started and checked."""

    name = "My server"
    package = "my_server"
    module: tuple[str, ...] = ("-m", "my_server")
    key_name = "MY_SERVER_API_KEY"
    plugin: Path | None = None

    def __init__(self, config: Config) -> None:
        self._config = config

    def arguments(
        self, checkpoint: CheckpointFacts, *, max_length: int, slots: int, port: str
    ) -> Sequence[str]:
        """Appended to `python -m my_server`, or to `rollout.engine.command`."""
        return (
            "--model-path",
            str(checkpoint.path),
            "--port",
            port,
            "--context-length",
            str(max_length),
            "--max-running-requests",
            str(slots),
            "--incremental-streaming-output",
            *self._config.extra_args,
        )

    def environment(self) -> Mapping[str, str]:
        """The environment of a server that is started here."""
        return dict(os.environ)

    def client(self, url: str, key: str | None) -> MyClient:
        """A client of the server at `url`, which presents `key`."""
        return MyClient(url, key, self._config)

    async def check(self, client: MyClient, checkpoint: CheckpointFacts, max_length: int) -> None:
        """Raises UserError for a server that would fail later."""
        models = await client.call("GET", "/v1/models")
        check_max_length(self.name, client.url, models, max_length)


class MyClient(HttpClient):
    """The server's routes."""

    def __init__(self, url: str, key: str | None, config: Config) -> None:
        super().__init__(
            "My server", url, key=key, silence_s=config.silence_s, update_s=config.update_s
        )
        self._pause_mode = config.pause_mode

    async def label(self) -> str:
        """The version label that the server stamps on tokens."""
        return str((await self.call("GET", "/model_info"))["weight_version"])

    async def cache_tokens(self) -> int:
        """0: the server does not report the size of its cache, so slots are the only limit."""
        return 0

    async def load(self, directory: Path, version: Version, on_update: OnUpdate) -> None:
        """Load `directory`, which has one `model.safetensors`."""
        await self.call("POST", "/pause_generation", json={"mode": self._pause_mode})
        body = {"model_path": str(directory), "weight_version": str(version), "flush_cache": False}
        await self.call("POST", "/update_weights_from_disk", json=body)
        await self.call("POST", "/continue_generation", json={})

    async def generate(
        self, request_id: str, request: ServerRequest, salt: str
    ) -> AsyncGenerator[Chunk, None]:
        """Stream one response, log-probs and version spans included."""
        sampling = {
            "temperature": request.temperature,
            "max_new_tokens": request.max_tokens,
            "ignore_eos": True,  # the engine itself finds the stop tokens
            "sampling_seed": request.seed,
        }
        body = {
            "rid": request_id,
            "input_ids": list(request.token_ids),
            "sampling_params": sampling,
            "return_logprob": True,
            "stream": True,
        }
        async with contextlib.aclosing(self.stream("/generate", body)) as events:
            async for event in events:
                yield _chunk(event)

    async def abort(self, request_id: str) -> None:
        """End a request."""
        await self.call("POST", "/abort_request", json={"rid": request_id})


def _chunk(event: Mapping[str, Any]) -> Chunk:
    meta = event["meta_info"]
    spans = meta.get("weight_versions")
    return Chunk(
        tokens=event["output_ids"],
        logprobs=[logprob for logprob, *_ in meta["output_token_logprobs"]],
        finish_reason=str((meta["finish_reason"] or {}).get("type", "")),
        spans=spans and [(span["version"], span["start"], span["end"]) for span in spans],
    )
