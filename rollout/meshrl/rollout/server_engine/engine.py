"""The engine that drives a stock server over its own HTTP routes, token in and token out.

    generate ─▶ concurrency limit ─▶ the server's stream ─▶ ResponseReader ─▶ TokenStream
    stage_weights ─▶ a safetensors file that the server can read; or they arrive in its device's memory (staging.py)
    commit_weights ─▶ the client pauses the server, makes it load the file, labels the version, resumes
    watchdog task ─▶ restarts a server that dies, with the served version; with none after a half-finished update

The server is a child process (`python`, `command`) or another program's (`url`); its kind is a `ServerKind`.
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
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

from typing_extensions import override

from meshrl.contract.errors import (
    EngineGoneError,
    FencedError,
    InfraError,
    MeshError,
    NotFoundError,
    UserError,
)
from meshrl.contract.ports import (
    AdapterSink,
    DeviceReceiver,
    Engine,
    LendingSink,
    LentBucket,
    LocatedSink,
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
from meshrl.rollout.end_tokens import StopStrings, with_end_of
from meshrl.rollout.ports import UNSERVED
from meshrl.rollout.server_engine.capacity import (
    CacheCapacity,
    ConcurrencyLimit,
    RunningRequest,
    TokenRate,
)
from meshrl.rollout.server_engine.checkpoint import (
    CheckpointFacts,
    check_adapter,
    check_version,
    read_checkpoint,
    write_adapter,
    write_version,
)
from meshrl.rollout.server_engine.config import ServerConfig
from meshrl.rollout.server_engine.kind import AnyServerKind, SleepingClient
from meshrl.rollout.server_engine.managed_server import ManagedServer
from meshrl.rollout.server_engine.request import ServerRequest, ended_before, read_request
from meshrl.rollout.server_engine.response import ResponseReader, end_delta
from meshrl.rollout.server_engine.staging import ServerLending, Staging, VersionFiles
from meshrl.rollout.streams import TokenStream, response_before
from meshrl.rollout.tokenizer import Tokenizer

log = logging.getLogger(__name__)

Push: TypeAlias = Callable[[GenerateDelta | MeshError], None]


class ServerEngine(Engine, AdapterSink, LendingSink, LocatedSink):
    """One server, and what is asked of it."""

    def __init__(
        self,
        kind: AnyServerKind,
        config: ServerConfig,
        *,
        model: Path,
        slots: int,
        tokenizer: Tokenizer | None,
    ) -> None:
        """Over the checkpoint directory `model`, up to `slots` requests at once; starts nothing.

        `tokenizer` is needed by requests with stop strings only. Raises ConfigError for options that do not say where
        the server is.
        """
        self._config = config
        self._server = ManagedServer(kind, config, slots=slots)
        self._model = model
        self._tokenizer = tokenizer
        self._token_texts: dict[int, str] = {}
        self._checkpoint: CheckpointFacts | None = None
        self._staging: Staging | None = None
        self._watchdog: asyncio.Task[None] | None = None
        self._responses: set[asyncio.Task[None]] = set()
        self._limit = ConcurrencyLimit(slots)
        self._server_lock = asyncio.Lock()
        """Held by the task that changes the server: an update or a restart."""
        self._suspect = asyncio.Event()
        self._staged: dict[Version, VersionFiles] = {}
        self._served: VersionFiles | None = None
        self._lending = ServerLending(config.weight_staging)
        self._version = UNSERVED
        self._up = False
        self.asleep = False
        """See `SleepingEngine`."""
        self._half_loaded = False
        """An update failed before its end: this server must not answer again."""
        self._restores = 0
        self._updates_begun = 0
        """A request that sees it change waits until the server reports which version sampled its tokens."""
        self._salt = uuid.uuid4().hex
        """A server at a `url` outlives its engines, whose versions may have the same labels."""
        self._rate = TokenRate()
        self._capacity = CacheCapacity(slots=slots, longest=1)
        self._updates = 0
        self._update_pause_s = 0.0

    @property
    def version(self) -> Version:
        """The version that samples the next token; UNSERVED before the first commit and while the server is down."""
        return self._version if self._up else UNSERVED

    @property
    def url(self) -> str:
        """Address of the server. Raises EngineGoneError before the start."""
        return self._server.client.url

    @property
    @override
    def where(self) -> str:
        return self._server.where

    @property
    def max_model_len(self) -> int:
        """Prompt and response tokens that one request may have."""
        return self._config.max_model_len or self._loaded().max_length

    async def start(self) -> None:
        """Read what the checkpoint says of its model, and start or find a server for it.

        Raises:
            UserError: the checkpoint cannot be read, or the server does not come up or cannot be used.
        """
        if self._watchdog is not None:
            return
        checkpoint = await asyncio.to_thread(read_checkpoint, self._model)
        ends = with_end_of(self._tokenizer, checkpoint.eos_token_ids)
        checkpoint = self._checkpoint = replace(checkpoint, eos_token_ids=ends)
        if self.max_model_len > checkpoint.max_length:
            raise UserError(
                f"rollout.engine.max_model_len is {self.max_model_len}, the checkpoint allows {checkpoint.max_length}"
            )
        self._staging = await asyncio.to_thread(
            Staging, self._config.staging, version_bytes=checkpoint.num_bytes
        )
        try:
            await self._server.start(checkpoint, self.max_model_len)
        except BaseException:
            self._staging.close()
            raise
        if self._config.stages_out_of_sight:
            log.warning(
                "rollout.engine.url %s is not on this machine, where new weights become files for it: set"
                " rollout.engine.staging to a folder of both, or no update reaches it",
                self.url,
            )
        self._capacity = CacheCapacity(slots=self._limit.slots, longest=self.max_model_len)
        self._up = True
        self._watchdog = asyncio.create_task(self._watch(), name=f"{self._server.name} watchdog")

    async def close(self) -> None:
        """Abort running requests, end a child server, remove staged versions. Idempotent."""
        self._end("closed")
        tasks = list(self._responses)
        if self._watchdog is not None:
            tasks.append(self._watchdog)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._server.close()
        if self._staging is not None:
            await asyncio.to_thread(self._staging.close)

    async def add_adapter(self, directory: Path) -> str:
        """Serve the adapter in `directory` beside all versions; the name by which `generate` takes it.

        Raises:
            MeshError: the server does not take it.
        """
        async with self._server_lock:
            self._limit.check()
            if not self._up:
                await self._recover()
            return await self._server.add_adapter(directory)

    async def remove_adapter(self, name: str) -> None:
        """Remove an adapter that no request names any more."""
        await self._server.remove_adapter(name)

    def generate(self, request: GenerateRequest, *, adapter: str = "") -> TokenStream:
        """Sample one response. Raises UserError, when iterated, for a request that cannot be run.

        `adapter`: the name of one that was added; empty: the served version answers.
        """
        stream = TokenStream()
        push = stream.push
        try:
            self._limit.check()
            server_request = read_request(
                request,
                self._config,
                self._loaded(),
                max_length=self.max_model_len,
                finds_strings=self._tokenizer is not None,
                adapter=adapter,
            )
            if reason := ended_before(request, server_request, self._stop_strings(request)):
                push(end_delta(self._version, reason))
                return stream
            response = asyncio.create_task(
                self._respond(request, server_request, push), name=f"respond {request.request_id}"
            )
        except (UserError, EngineGoneError) as error:
            push(error)
            return stream
        self._responses.add(response)
        response.add_done_callback(functools.partial(self._responded, push))
        stream.on_close = functools.partial(_cancel, response)
        return stream

    @property
    def most_lora_rank(self) -> int:
        """Largest rank of an adapter; 0: it serves none."""
        return self._config.max_lora_rank

    @property
    def gone(self) -> bool:
        """Whether it has stopped and will not restart."""
        return self._limit.ended is not None

    @property
    @override
    def serves_adapters(self) -> bool:
        return self.most_lora_rank > 0

    async def stage_weights(self, manifest: WeightManifest, buckets: Sequence[Uint8]) -> None:
        """Write a version to the staging directory; see `WeightSink.stage_weights`."""
        checkpoint, staging = self._loaded(), self._staging
        if staging is None:
            raise EngineGoneError("the engine is not started")
        self._limit.check()
        files = staging.new()
        if self.serves_adapters:
            check_adapter(manifest, buckets, checkpoint, self._config.max_lora_rank)
            await asyncio.to_thread(write_adapter, files.path, manifest, buckets)
        else:
            check_version(manifest, buckets, checkpoint)
            self._lending.check_host(manifest.version, first=self._version == UNSERVED)
            tied = checkpoint.tied
            await asyncio.to_thread(write_version, files.path, manifest, buckets, tied=tied)
            self._lending.ask(files.path)
        await self._keep(manifest.version, files)

    @override
    async def lend(
        self, manifest: WeightManifest, receiver: DeviceReceiver
    ) -> Sequence[LentBucket]:
        return () if self.serves_adapters else await self._lending.lend(manifest, receiver)

    @override
    async def stage_lent(self, manifest: WeightManifest, digests: Sequence[str]) -> None:
        """Stage a version in lent memory; the server's loader finds its tensors there."""
        checkpoint, staging = self._loaded(), self._staging
        if staging is None:
            raise EngineGoneError("the engine is not started")
        self._limit.check()
        self._check_lends(manifest.version)
        check_version(manifest, [range(nbytes) for nbytes in manifest.bucket_bytes], checkpoint)
        files = staging.new(on_device=True)
        self._lending.arrived(files.path, manifest, digests, tied=checkpoint.tied)
        await self._keep(manifest.version, files)

    async def _keep(self, version: Version, files: VersionFiles) -> None:
        """Note the version as staged, and remove the files of an earlier attempt."""
        replaced = self._staged.get(version)
        self._staged[version] = files
        if replaced is not None:
            await asyncio.to_thread(replaced.remove)

    def _check_lends(self, version: Version) -> None:
        if not self._lending.lends:
            raise InfraError(
                f"{self._server.name} has ended, and weights {version} lay in its device's memory"
            )

    async def discard_weights(self, version: Version) -> None:
        """Remove a staged version."""
        files = self._staged.pop(version, None)
        if files is not None:
            await asyncio.to_thread(files.remove)

    async def commit_weights(self, version: Version, on_update: OnUpdate) -> None:
        """Serve the staged `version`. Committing twice is committing once.

        Raises:
            NotFoundError: it is not staged.
            FencedError: a newer version is served.
            InfraError: the server failed during the update; it is abandoned, and the restarted one serves no version.
            EngineGoneError: the engine has stopped.
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
            async with self._limit.closed():
                if on_update is OnUpdate.DRAIN and not self.asleep:
                    await self._limit.until(lambda: self._limit.running == 0)
                else:
                    began = time.perf_counter()
                if not self._up or self._suspect.is_set():
                    await self._recover()
                if self._staged[version].on_device:
                    self._check_lends(version)
                await self._load(self._staged[version], version, on_update)
        self._updates += 1
        self._update_pause_s = time.perf_counter() - began
        for old in [each for each in self._staged if each <= version]:
            files = self._staged.pop(old)
            if files is not self._served:
                await asyncio.to_thread(files.remove)

    async def sleep(self) -> None:
        """Have the server give up its device's memory; a child that does not is ended, and started by `wake`.

        Raises:
            EngineGoneError: a server at a `url` did not.
        """
        async with self._server_lock:
            if self.asleep:
                return
            self.asleep = True
            if not self._up:
                return
            client, server = self._server.client, self._server
            try:
                if not isinstance(client, SleepingClient):
                    raise InfraError(f"{server.name} cannot give up its device")
                await client.sleep()
            except MeshError as error:
                if not server.replaceable:
                    raise EngineGoneError(f"{client.url} keeps its device: {error}") from error
                log.warning("%s does not sleep (%s), so it is ended", server.name, error)
                self._up = False
                await server.close()

    async def wake(self) -> None:
        """Serve the version of before again; it is loaded from the staged files."""
        async with self._server_lock, self._limit.closed():
            if not self.asleep or self._served is None:
                return
            try:
                if self._up:
                    files, version = self._served, self._version
                    await self._server.client.load(files.path, version, OnUpdate.INTERRUPT)
            except MeshError as error:
                log.warning("%s does not wake: %s", self._server.name, error)
                self._up = False
            self.asleep = False
            if not self._up:
                await self._recover()

    async def serve_checkpoint(self, version: Version) -> None:
        """Serve the weights in the model directory itself, as `version`: evaluation without a trainer."""
        self._staged[version] = VersionFiles(path=self._model, temporary=False)
        await self.commit_weights(version, OnUpdate.DRAIN)

    def stats(self) -> EngineStats:
        """Never blocks."""
        return EngineStats(
            version=self.version,
            running=self._limit.running,
            capacity=self._capacity.capacity(self._server.cache_tokens),
            tokens_generated=self._rate.total,
            tokens_per_s=self._rate.per_s if self._limit.running else 0.0,
            updates=self._updates,
            update_pause_s=self._update_pause_s,
            staging=self._lending.staging,
        )

    # Requests

    async def _respond(
        self, request: GenerateRequest, server_request: ServerRequest, push: Push
    ) -> None:
        """Run one request, from waiting for a slot to its last delta."""
        prompt = len(server_request.token_ids)
        running = self._capacity.begin(prompt=prompt, longest=prompt + server_request.max_tokens)
        finished = False
        try:
            async with self._limit.slot(self._serving):
                await self._relay(request, server_request, push, running)
                finished = True
        except MeshError as error:
            if not isinstance(error, UserError):
                self._suspect.set()
            push(error)
        finally:
            self._capacity.end(running, finished=finished)

    async def _relay(
        self,
        request: GenerateRequest,
        server_request: ServerRequest,
        push: Push,
        running: RunningRequest,
    ) -> None:
        client, updates_begun = self._server.client, self._updates_begun
        reader = ResponseReader(
            self._version,
            self._stop_strings(request),
            response_before(request),
            server_request.stop_token_ids,
            experts_of=None
            if server_request.experts_from is None
            else len(server_request.token_ids) - server_request.experts_from,
        )
        request_id = uuid.uuid4().hex
        # Each load of each engine has a salt of its own, so a prefix that other weights cached is never found.
        salt = f"{self._salt}.{updates_begun}"
        async with contextlib.aclosing(client.generate(request_id, server_request, salt)) as chunks:
            async for chunk in chunks:
                was_stopped = reader.stopped
                new = reader.add(chunk)
                self._rate.add(new)
                running.length += new
                if chunk.finish_reason:
                    for delta in reader.rest(chunk):
                        push(delta)
                    self._restores = 0
                    return
                if reader.stopped and not was_stopped:
                    await client.abort(request_id)
                elif updates_begun == self._updates_begun and (certain := reader.certain()):
                    push(certain)
        raise InfraError(
            f"{self._server.name} at {client.url} ended a response without a finish reason"
        )

    def _stop_strings(self, request: GenerateRequest) -> StopStrings | None:
        if not request.sampling.stop or self._tokenizer is None:
            return None
        return StopStrings(request.sampling.stop, self._tokenizer, self._token_texts)

    def _responded(self, push: Push, response: asyncio.Task[None]) -> None:
        """End the stream of a request that was cancelled, perhaps before it began."""
        self._responses.discard(response)
        if response.cancelled():
            push(end_delta(self._version, "abort"))
        elif error := response.exception():
            push(InfraError(f"{type(error).__name__}: {error}"))

    def _serving(self) -> bool:
        serves = self._up and self._version != UNSERVED
        return serves and not self.asleep and not self._suspect.is_set()

    # The server

    async def _load(self, files: VersionFiles, version: Version, on_update: OnUpdate) -> None:
        """Make the server serve `files`; the caller holds the lock and has closed the concurrency limit.

        A server cannot undo a half-loaded version: after any failure its process is not used again.
        """
        self._updates_begun += 1
        try:
            await self._server.client.load(files.path, version, on_update)
        except BaseException as error:
            self._up, self._half_loaded, self._version = False, True, UNSERVED
            self._suspect.set()
            if isinstance(error, (MeshError, OSError)):
                last_words = await self._server.last_words(error)
                raise InfraError(
                    f"loading weights {version} failed in {self._server.name}: {error}{last_words}"
                ) from error
            raise
        await asyncio.to_thread(self._lending.loaded, files.path)
        previous, self._served = self._served, files
        self._version, self.asleep = version, False
        if previous is not None and previous is not files:
            await asyncio.to_thread(previous.remove)

    async def _watch(self) -> None:
        """Restore the server whenever it fails.

        Waits for the end of the child process or a failed request. Produces a server that serves the same version as
        before, or the end of the engine.
        """
        while self._limit.ended is None:
            await self._failure()
            await self._limit.until(lambda: not self.asleep)  # the device is not the engine's
            try:
                async with self._server_lock:
                    await self._recover()
            except Exception as error:
                # Whatever failed, no request may wait for a response that will not come.
                unexpected = not isinstance(error, MeshError)
                log.error(
                    "the engine over %s stops: %s", self._server.name, error, exc_info=unexpected
                )
                self._end(str(error))
                await self._limit.notify()

    async def _failure(self) -> None:
        waits = [
            asyncio.ensure_future(self._server.ended()),
            asyncio.ensure_future(self._suspect.wait()),
        ]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)

    async def _recover(self) -> None:
        """Restart the server if it does not serve the version; the caller holds the lock.

        After a failed update the restarted server serves no version.

        Raises:
            MeshError: the server cannot be restored.
        """
        label = None if self._version == UNSERVED else str(self._version)
        if self._up and await self._server.serves(label):
            self._suspect.clear()
            await self._limit.notify()
            return
        self._up = False
        self._suspect.clear()
        self._restores += 1
        reason = self._server.exit_reason()
        if self._half_loaded and not self._server.replaceable:
            raise EngineGoneError(
                f"the {self._server.name} server at {self.url} failed during a weight update and may be half loaded: "
                "restart it"
            )
        if self._restores > self._config.restarts:
            raise EngineGoneError(
                f"{self._server.name} failed {self._restores} times with no response in between, last: {reason}"
            )
        log.warning(
            "%s failed (%s); restoring it at version %s", self._server.name, reason, self._version
        )
        served = self._served
        self._lending.forget()
        if served is not None and served.on_device and not self._half_loaded:
            raise EngineGoneError(
                f"{self._server.name} failed ({reason}), and weights {self._version} lay in its device's memory only"
            )
        await self._server.start(self._loaded(), self.max_model_len)
        if self._half_loaded:
            self._served, self._half_loaded = None, False
            if served is not None:
                await asyncio.to_thread(served.remove)
        elif served is not None:
            await self._load(served, self._version, OnUpdate.IN_FLIGHT)
        self._up = True
        await self._limit.notify()

    def _end(self, reason: str) -> None:
        self._limit.end(reason)
        self._up = False

    def _loaded(self) -> CheckpointFacts:
        if self._checkpoint is None:
            raise EngineGoneError("the engine is not started")
        return self._checkpoint


def _cancel(response: asyncio.Task[None]) -> None:
    response.cancel()
