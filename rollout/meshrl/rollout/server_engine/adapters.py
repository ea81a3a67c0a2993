"""LoRA adapters that a server serves beside its base model: each version one, under a name of its own.

    load      the server reads the new adapter ▸ new requests get it ▸ those that run end with the one they began with
    a stream  every token is of the adapter that its request named, whatever was loaded meanwhile

Nothing is paused, and an adapter that no request needs any more is unloaded.
"""

from __future__ import annotations

import contextlib
import dataclasses
import uuid
from collections import Counter
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Protocol

from meshrl.contract.errors import InfraError, MeshError
from meshrl.contract.types import Version
from meshrl.rollout.server_engine.checkpoint import ADAPTER_FILE
from meshrl.rollout.server_engine.response import Chunk


class AdapterClient(Protocol):
    """The routes that this needs of a server."""

    async def load_adapter(self, name: str, directory: Path) -> None:
        """Serve what is in `directory` to requests that say `name`. Raises MeshError."""
        ...

    async def unload_adapter(self, name: str) -> None:
        """No request says `name` any more. Raises MeshError."""
        ...

    async def set_label(self, version: Version) -> None:
        """The label that the server stamps on tokens. Raises MeshError."""
        ...

    async def label(self) -> str:
        """That label. Raises MeshError."""
        ...


class ServedAdapters:
    """The adapters of one client of a server."""

    def __init__(self, client: AdapterClient) -> None:
        self._client = client
        self._newest = ""
        """What the server calls the adapter of new requests; empty: the base model answers."""
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
        """What a new request has to name; empty: nothing."""
        return self._newest

    async def labelled(
        self, name: str, chunks: AsyncGenerator[Chunk, None]
    ) -> AsyncGenerator[Chunk, None]:
        """The chunks of a request that named `name`, with its version.

        The server's own labels stay where others than this client's are among them: somebody changed its weights.
        """
        tokens = 0
        self._running[name] += 1
        try:
            async with contextlib.aclosing(chunks):
                async for chunk in chunks:
                    tokens += len(chunk.tokens)
                    spans = chunk.spans
                    if name and spans and {label for label, *_ in spans} <= self._labels:
                        spans = [(self._versions[name], 0, tokens)]
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
