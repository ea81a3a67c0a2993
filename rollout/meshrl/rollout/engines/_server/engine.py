"""The engine that drives a stock server over its own HTTP routes, token in and token out.

    generate ─▶ gate (slots, versions) ─▶ the server's stream ─▶ Answer ─▶ TokenStream
    stage_weights ─▶ a safetensors file that the server sees
    commit_weights ─▶ the client pauses the server, has it load the file, labels it, lets it go on
    keeper ─▶ a server that dies is started anew and given the served version; a half-loaded one comes back empty

The server is a child process (`python`, `command`) or somebody else's (`url`). What kind it is, the `Host` knows.
Imports no torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

from meshrl.contract.errors import (
    FencedError,
    InfraError,
    MeshError,
    NotFoundError,
    UnavailableError,
    UserError,
)
from meshrl.contract.types import (
    EngineStats,
    GenerateDelta,
    GenerateRequest,
    OnUpdate,
    Uint8,
    Version,
    WeightManifest,
)
from meshrl.rollout.capacity import Room, Running
from meshrl.rollout.engines._server.checkpoint import (
    Checkpoint,
    check_version,
    read_checkpoint,
    write_version,
)
from meshrl.rollout.engines._server.concurrency_limit import ConcurrencyLimit
from meshrl.rollout.engines._server.config import ServerConfig
from meshrl.rollout.engines._server.rate import Rate
from meshrl.rollout.engines._server.request import Ask, ended_before, read_request
from meshrl.rollout.engines._server.response import Answer, ended
from meshrl.rollout.engines._server.server import Host
from meshrl.rollout.engines._server.staging import Files, Staging
from meshrl.rollout.streams import TokenStream, response_before
from meshrl.rollout.tokenizer import Tokenizer
from meshrl.rollout.torch_engine.stopping import StopStrings
from meshrl.rollout.versions import UNSERVED

log = logging.getLogger(__name__)

Push: TypeAlias = Callable[[GenerateDelta | MeshError], None]


class ServerEngine:
    """Satisfies `meshrl.contract.ports.Engine`."""

    def __init__(
        self,
        config: ServerConfig,
        host: Host,
        *,
        model: Path,
        slots: int,
        tokenizer: Tokenizer | None,
    ) -> None:
        """Over the checkpoint directory `model`, up to `slots` requests at once.

        `tokenizer` is needed by requests with stop strings only.
        """
        self._config = config
        self._host = host
        self._model = model
        self._tokenizer = tokenizer
        self._pieces: dict[int, str] = {}
        self._checkpoint: Checkpoint | None = None
        self._staging: Staging | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._answers: set[asyncio.Task[None]] = set()
        self._gate = ConcurrencyLimit(slots)
        self._server_lock = asyncio.Lock()
        """Held by whoever changes the server: an update, or its restoration."""
        self._suspect = asyncio.Event()
        self._staged: dict[Version, Files] = {}
        self._served: Files | None = None
        self._version = UNSERVED
        self._up = False
        self._half_loaded = False
        """An update failed on the way: this server may never answer again."""
        self._restores = 0
        self._borders = 0
        """Updates begun. A request that sees it change waits for the server's account of its tokens."""
        self._rate = Rate()
        self._room = Room(slots=slots, longest=1)
        self._updates = 0
        self._update_pause_s = 0.0

    @property
    def version(self) -> Version:
        """The version that samples the next token; UNSERVED before the first commit and while there is no server."""
        return self._version if self._up else UNSERVED

    @property
    def url(self) -> str:
        """Where the server listens. Raises UnavailableError before the start."""
        return self._host.client.url

    @property
    def max_model_len(self) -> int:
        """Prompt and response tokens that one request may have."""
        return self._config.max_model_len or self._loaded().max_length

    async def start(self) -> None:
        """Read the checkpoint's facts and have a server for it.

        Raises:
            UserError: the checkpoint cannot be read, or the server does not come up or cannot be driven.
        """
        if self._keeper is not None:
            return
        checkpoint = self._checkpoint = await asyncio.to_thread(read_checkpoint, self._model)
        if self.max_model_len > checkpoint.max_length:
            raise UserError(
                f"rollout.engine.max_model_len is {self.max_model_len}, the checkpoint allows {checkpoint.max_length}"
            )
        self._staging = await asyncio.to_thread(
            Staging, self._config.staging, version_bytes=checkpoint.num_bytes
        )
        try:
            await self._host.start(checkpoint, self.max_model_len)
        except BaseException:
            self._staging.close()
            raise
        self._room = Room(slots=self._gate.slots, longest=self.max_model_len)
        self._up = True
        self._keeper = asyncio.create_task(self._keep(), name=f"{self._host.name} keeper")

    async def close(self) -> None:
        """Abort what runs, end a child server, remove what is staged. Idempotent."""
        self._end("closed")
        tasks = [*self._answers, *([self._keeper] if self._keeper else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._host.close()
        if self._staging is not None:
            await asyncio.to_thread(self._staging.close)

    def generate(self, request: GenerateRequest) -> TokenStream:
        """Sample one response. Raises UserError, when iterated, for a request that cannot be run."""
        stream = TokenStream()
        push = stream.push
        try:
            self._gate.check()
            ask = read_request(
                request,
                self._config,
                self._loaded(),
                max_length=self.max_model_len,
                finds_strings=self._tokenizer is not None,
            )
            if reason := ended_before(request, ask, self._stop_strings(request)):
                push(ended(self._version, reason))
                return stream
            answer = asyncio.create_task(
                self._answer(request, ask, push), name=f"answer {request.request_id}"
            )
        except (UserError, UnavailableError) as error:
            push(error)
            return stream
        self._answers.add(answer)
        answer.add_done_callback(functools.partial(self._answered, push))
        stream.on_close(functools.partial(_cancel, answer))
        return stream

    async def stage_weights(self, manifest: WeightManifest, buckets: Sequence[Uint8]) -> None:
        """Write a version beside the served one; see `WeightSink.stage_weights`."""
        checkpoint, staging = self._loaded(), self._staging
        if staging is None:
            raise UnavailableError("the engine is not started")
        self._gate.check()
        check_version(manifest, buckets, checkpoint)
        files = staging.new()
        await asyncio.to_thread(write_version, files.path, manifest, buckets, tied=checkpoint.tied)
        replaced = self._staged.get(manifest.version)
        self._staged[manifest.version] = files
        if replaced is not None:
            await asyncio.to_thread(replaced.remove)

    async def discard_weights(self, version: Version) -> None:
        """Forget a staged version."""
        files = self._staged.pop(version, None)
        if files is not None:
            await asyncio.to_thread(files.remove)

    async def commit_weights(self, version: Version, on_update: OnUpdate) -> None:
        """Serve the staged `version`. Committing twice is committing once.

        Raises:
            NotFoundError: it is not staged.
            FencedError: a newer version is served.
            InfraError: the server failed on the way; it is given up, and its successor serves nothing.
            UnavailableError: the engine has stopped.
        """
        if version == self._version:
            return
        began = time.perf_counter()
        async with self._server_lock:
            if version == self._version:
                return
            if version not in self._staged:
                known = ", ".join(str(each) for each in self._staged) or "none"
                raise NotFoundError(f"version {version} is not staged (staged: {known})")
            if version < self._version:
                raise FencedError(f"version {version} is older than the serving {self._version}")
            async with self._gate.closed():
                if on_update is OnUpdate.DRAIN:
                    await self._gate.until(lambda: self._gate.running == 0)
                else:
                    began = time.perf_counter()
                if not self._up or self._suspect.is_set():
                    await self._recover()
                await self._load(self._staged[version], version, on_update)
        self._updates += 1
        self._update_pause_s = time.perf_counter() - began
        for old in [each for each in self._staged if each <= version]:
            files = self._staged.pop(old)
            if files is not self._served:
                await asyncio.to_thread(files.remove)

    async def serve_checkpoint(self, version: Version) -> None:
        """Serve the weights in the model directory itself, as `version`: evaluation without a trainer."""
        self._staged[version] = Files(path=self._model, ours=False)
        await self.commit_weights(version, OnUpdate.DRAIN)

    def stats(self) -> EngineStats:
        """Never blocks."""
        return EngineStats(
            version=self.version,
            running=self._gate.running,
            capacity=self._room.capacity(self._host.cache_tokens),
            tokens_generated=self._rate.total,
            tokens_per_s=self._rate.per_s if self._gate.running else 0.0,
            updates=self._updates,
            update_pause_s=self._update_pause_s,
        )

    # Requests

    async def _answer(self, request: GenerateRequest, ask: Ask, push: Push) -> None:
        """One request, from waiting for a slot to its last delta."""
        prompt = len(ask.token_ids)
        sequence = self._room.begin(prompt=prompt, longest=prompt + ask.max_tokens)
        whole = False
        try:
            async with self._gate.slot(self._serving):
                await self._relay(request, ask, push, sequence)
                whole = True
        except MeshError as error:
            if not isinstance(error, UserError):
                self._suspect.set()
            push(error)
        finally:
            self._room.end(sequence, whole=whole)

    async def _relay(
        self, request: GenerateRequest, ask: Ask, push: Push, sequence: Running
    ) -> None:
        client, borders = self._host.client, self._borders
        answer = Answer(
            self._version,
            self._stop_strings(request),
            response_before(request),
            ask.stop_token_ids,
        )
        request_id = uuid.uuid4().hex
        # A prefix cached under other weights is never found again: their salt was another.
        salt = str(self._version)
        async with contextlib.aclosing(client.generate(request_id, ask, salt)) as chunks:
            async for chunk in chunks:
                was_stopped = answer.stopped
                fresh = answer.add(chunk)
                self._rate.add(fresh)
                sequence.now += fresh
                if chunk.finish_reason:
                    for delta in answer.rest(chunk):
                        push(delta)
                    self._restores = 0
                    return
                if answer.stopped and not was_stopped:
                    await client.abort(request_id)
                elif borders == self._borders and (certain := answer.certain()):
                    push(certain)
        raise InfraError(f"{self._host.name} at {client.url} ended a response without saying why")

    def _stop_strings(self, request: GenerateRequest) -> StopStrings | None:
        if not request.sampling.stop or self._tokenizer is None:
            return None
        return StopStrings(request.sampling.stop, self._tokenizer, self._pieces)

    def _answered(self, push: Push, answer: asyncio.Task[None]) -> None:
        """Tell a reader whose request was cancelled, perhaps before it began."""
        self._answers.discard(answer)
        if answer.cancelled():
            push(ended(self._version, "abort"))
        elif error := answer.exception():
            push(InfraError(f"{type(error).__name__}: {error}"))

    def _serving(self) -> bool:
        return self._up and self._version != UNSERVED and not self._suspect.is_set()

    # The server

    async def _load(self, files: Files, version: Version, on_update: OnUpdate) -> None:
        """Make the server serve `files`; the caller holds the lock and the gate.

        A server cannot take a half-loaded version back: whatever goes wrong, its process is not used again.
        """
        self._borders += 1
        try:
            await self._host.client.load(files.path, version, on_update)
        except BaseException as error:
            self._up, self._half_loaded, self._version = False, True, UNSERVED
            self._suspect.set()
            if isinstance(error, MeshError):
                raise InfraError(
                    f"weights {version} did not get into {self._host.name}: {error}"
                ) from error
            raise
        previous, self._served = self._served, files
        self._version = version
        if previous is not None and previous is not files:
            await asyncio.to_thread(previous.remove)

    async def _keep(self) -> None:
        """Restore the server whenever it fails.

        Waits for a child's end or a failed request. Produces a server that serves what was served, or the end of
        the engine.
        """
        while self._gate.ended is None:
            await self._trouble()
            try:
                async with self._server_lock:
                    await self._recover()
            except Exception as error:
                # Whatever broke, nobody may wait for an answer that will not come.
                unexpected = not isinstance(error, MeshError)
                log.error(
                    "the engine over %s stops: %s", self._host.name, error, exc_info=unexpected
                )
                self._end(str(error))
                await self._gate.notify()

    async def _trouble(self) -> None:
        waits = [
            asyncio.ensure_future(self._host.ended()),
            asyncio.ensure_future(self._suspect.wait()),
        ]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)

    async def _recover(self) -> None:
        """Have a server that serves the version again, or nothing after a failed update; the caller holds the lock.

        Raises:
            MeshError: it cannot be had.
        """
        label = None if self._version == UNSERVED else str(self._version)
        if self._up and await self._host.serves(label):
            self._suspect.clear()
            await self._gate.notify()
            return
        self._up = False
        self._suspect.clear()
        self._restores += 1
        why = self._host.last_words()
        if self._half_loaded and not self._host.replaceable:
            raise UnavailableError(
                f"the {self._host.name} server at {self.url} failed during a weight update and may be half loaded: "
                "restart it"
            )
        if self._restores > self._config.restarts:
            raise UnavailableError(
                f"{self._host.name} failed {self._restores} times with no response in between, last: {why}"
            )
        log.warning(
            "%s failed (%s); restoring it at version %s", self._host.name, why, self._version
        )
        await self._host.start(self._loaded(), self.max_model_len)
        served = self._served
        if self._half_loaded:
            self._served, self._half_loaded = None, False
            if served is not None:
                await asyncio.to_thread(served.remove)
        elif served is not None:
            await self._load(served, self._version, OnUpdate.IN_FLIGHT)
        self._up = True
        await self._gate.notify()

    def _end(self, reason: str) -> None:
        self._gate.end(reason)
        self._up = False

    def _loaded(self) -> Checkpoint:
        if self._checkpoint is None:
            raise UnavailableError("the engine is not started")
        return self._checkpoint


def _cancel(answer: asyncio.Task[None]) -> None:
    answer.cancel()
