"""Protocols of one kind of server: its start and check (`ServerKind`), its routes (`ServerClient`).

`engines/vllm.py` and `engines/sglang.py` are two such files. Everything else of an engine over a server (slots,
versions, responses, staging, restarts) is in this package and knows these two protocols only.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import uuid
from collections import Counter
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

from meshrl.contract.errors import InfraError, MeshError, UserError
from meshrl.contract.types import Media, OnUpdate, Version
from meshrl.images import ImageProcessor
from meshrl.rollout.server_engine.checkpoint import ADAPTER_FILE, CheckpointFacts
from meshrl.rollout.server_engine.request import Picture, ServerRequest
from meshrl.rollout.server_engine.response import Chunk

ALMOST_ZERO = 1e-3


class ServerClient(Protocol):
    """Calls one server. `server_engine.http.HttpClient` has `url`, `close` and `healthy`."""

    @property
    def url(self) -> str:
        """Address of the server."""
        ...

    async def close(self) -> None:
        """Free the connections."""
        ...

    async def healthy(self, wait_s: float) -> bool:
        """Whether the server and its engine answer within `wait_s` seconds."""
        ...

    async def label(self) -> str:
        """The version label that the server currently stamps on tokens. Raises MeshError."""
        ...

    async def cache_tokens(self) -> int:
        """Tokens that the server's KV cache holds; 0 where the server does not report it."""
        ...

    async def load(self, directory: Path, version: Version, on_update: OnUpdate) -> None:
        """Serve the weights in `directory` as `version`; `on_update` says what happens to running requests.

        Raises:
            MeshError: at any point; the server must then be considered half loaded.
        """
        ...

    def generate(
        self, request_id: str, request: ServerRequest, salt: str
    ) -> AsyncGenerator[Chunk, None]:
        """Stream one response; closing the iterator aborts the request. `salt` separates the versions' prefix caches.

        Raises:
            UserError: the server refuses the request.
            InfraError: the server failed, disconnected or sent nothing for too long.
        """
        ...

    async def abort(self, request_id: str) -> None:
        """End a request; its stream gets a last chunk."""
        ...


@runtime_checkable
class SleepingClient(ServerClient, Protocol):
    """Client of a server that can release its device memory."""

    async def sleep(self) -> None:
        """Pause what runs, and give up weights and cache. The next `load` takes the memory again, and resumes.

        Raises:
            MeshError: the server may still have the memory.
        """
        ...


Client = TypeVar("Client", bound=ServerClient)


class ServerKind(Protocol[Client]):
    """One kind of server: how it is started, and whether a running one can be used."""

    name: str
    """The name in messages."""
    package: str
    """The Python package that its environment must have."""
    module: tuple[str, ...]
    """Arguments that make that environment's interpreter run the server, which asks for its key."""
    key_name: str
    """The environment variable with the key of the server."""
    plugin: Path | None
    """A folder for the server's PYTHONPATH; None: nothing of ours runs in its workers."""

    def arguments(
        self, checkpoint: CheckpointFacts, *, max_length: int, slots: int, port: str
    ) -> Sequence[str]:
        """Command-line arguments of a server that is started here."""
        ...

    def environment(self) -> Mapping[str, str]:
        """Environment of a server that is started here; `rollout.engine.env` is added to it."""
        ...

    def client(self, url: str, key: str | None) -> Client:
        """A client of the server at `url`, which presents `key`."""
        ...

    async def check(self, client: Client, checkpoint: CheckpointFacts, max_length: int) -> None:
        """Try everything that generation and updates will need on a server that is up.

        Raises:
            UserError: naming the option that the server was started without, or its limit below `max_length`.
        """
        ...


AnyServerKind = ServerKind[Any]

PROBE = ServerRequest(
    token_ids=[1, 2, 3],
    temperature=1.0,
    top_p=1.0,
    top_k=1,
    max_tokens=1,
    stop_token_ids=(),
    seed=0,
    stream_interval=1,
)
"""For `check`: one token of top-k 1. Its processed probability is 1, its raw one is not."""


def picture_probe(images: ImageProcessor) -> ServerRequest:
    """`PROBE` with a small grey picture."""
    from PIL import Image

    file = io.BytesIO()
    Image.new("RGB", (64, 64), "grey").save(file, "PNG")
    media = Media.of(file.getvalue())
    count = images.num_tokens(media, "the probe")
    return replace(
        PROBE,
        token_ids=[*PROBE.token_ids, *([images.placeholder] * count), *PROBE.token_ids],
        pictures=(
            Picture(media=media, start=len(PROBE.token_ids), num_tokens=count, images=images),
        ),
    )


def processed(chunks: Sequence[Chunk]) -> bool:
    """Whether the answer to `PROBE` has log-probs of the distribution that was sampled (after top-k)."""
    return all(logprob >= -ALMOST_ZERO for chunk in chunks for logprob in chunk.logprobs)


_SIZES = (
    "architectures",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "num_experts",
    "vocab_size",
)
"""Keys of config.json that must be equal for weights of one model to fit another."""


def check_same_model(
    name: str, url: str, models: Mapping[str, Any], checkpoint: CheckpointFacts
) -> None:
    """Compare the model that an OpenAI `/v1/models` names with ours, where it is a directory that is seen here.

    Raises:
        UserError: they have other sizes: no version would fit.
    """
    (card, *_) = models["data"]
    theirs = Path(str(card.get("root") or card.get("id"))) / "config.json"
    ours = checkpoint.path / "config.json"
    if not theirs.is_file():  # on its own machine, or by a hub's name: the first version shows it
        return
    configs = [json.loads(each.read_text()) for each in (theirs, ours)]
    for key in _SIZES:
        found, wanted = (config.get("text_config", config).get(key) for config in configs)
        if found != wanted:
            raise UserError(
                f"the {name} server at {url} serves {theirs.parent}, whose {key} is {found}; model.path is "
                f"{checkpoint.path}, with {wanted}: start the server with the model that is trained"
            )


def check_max_length(
    name: str, url: str, models: Mapping[str, Any], max_length: int, *, reserved: int = 0
) -> None:
    """Compare the answer of an OpenAI `/v1/models` with the engine's `max_length`, in tokens of prompt and response.

    `reserved`: tokens of its context length that the server gives to no request.

    Raises:
        UserError: the server allows fewer.
    """
    (card, *_) = models["data"]
    length = card.get("max_model_len")
    allowed = length - reserved if length else max_length
    if allowed < max_length:
        raise UserError(
            f"the {name} server at {url} allows {allowed} tokens of prompt and response, the engine "
            f"{max_length}: set rollout.engine.max_model_len"
        )


@runtime_checkable
class AdapterClient(Protocol):
    """The routes of a server that serves adapters."""

    async def load_adapter(self, name: str, directory: Path) -> None:
        """Serve what is in `directory` to requests that say `name`. Raises MeshError."""
        ...

    async def unload_adapter(self, name: str) -> None:
        """Unload adapter `name`, which no request names any more. Raises MeshError."""
        ...

    async def set_label(self, version: Version) -> None:
        """Set the label that the server stamps on tokens. Raises MeshError."""
        ...

    async def label(self) -> str:
        """The label of the server's weights. Raises MeshError."""
        ...


class ServedAdapters:
    """The LoRA adapters that one client of a server serves: each version one, under a name of its own.

    New requests get the newest; those that run end with the one they began with. Nothing is paused, and an adapter
    that no request needs any more is unloaded.
    """

    def __init__(self, client: AdapterClient) -> None:
        self._client = client
        self._newest = ""
        """The server's name for the adapter of new requests; empty: the base model answers."""
        self._running: Counter[str] = Counter()
        """Requests by the adapter that they began with."""
        self._versions: dict[str, str] = {}
        """Label of a version by its adapter."""
        self._labels: set[str] = set()
        """All that this client has set."""

    async def load(self, directory: Path, version: Version) -> None:
        """New requests get the adapter in `directory`; the base model where there is none.

        Raises:
            MeshError: new requests must get nothing of this version.
        """
        name = ""
        if (directory / ADAPTER_FILE).is_file():
            name = f"{version}-{uuid.uuid4().hex}"  # two clients of a server have versions alike
            await self._client.load_adapter(name, directory)
        await self._client.set_label(version)
        label = await self._client.label()
        if label != str(version):
            raise InfraError(f"the server says its weights are {label!r}, not {version}")
        self._versions[name] = label
        self._labels.add(label)
        previous, self._newest = self._newest, name
        await self._forget(previous)

    @property
    def newest(self) -> str:
        """Adapter that a new request has to name; empty: none."""
        return self._newest

    async def labelled(
        self, name: str, chunks: AsyncGenerator[Chunk, None]
    ) -> AsyncGenerator[Chunk, None]:
        """The chunks of a request that named `name`, with its version.

        The server's own labels stay if one of them is not this client's: another client changed its weights.
        """
        tokens = 0
        self._running[name] += 1
        try:
            async with contextlib.aclosing(chunks):
                async for chunk in chunks:
                    tokens += len(chunk.tokens)
                    spans = chunk.spans
                    version = self._versions.get(name) if name else None
                    if version and spans and {label for label, *_ in spans} <= self._labels:
                        spans = [(version, 0, tokens)]
                    yield dataclasses.replace(chunk, spans=spans)
        finally:
            self._running[name] -= 1
            await self._forget(name)

    async def _forget(self, name: str) -> None:
        """Unload an adapter that no request needs any more."""
        if name == self._newest or self._running[name]:
            return
        del self._running[name]
        if name and self._versions.pop(name, ""):
            with contextlib.suppress(MeshError):  # the server makes room by itself
                await self._client.unload_adapter(name)
