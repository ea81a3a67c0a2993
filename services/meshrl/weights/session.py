"""The replica's end of one joining: from the first PROPOSE to the end of the stream."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

import numpy as np

from meshrl.config.weights import WeightsConfig
from meshrl.contract.errors import (
    ConflictError,
    CorruptError,
    FencedError,
    InfraError,
    MeshError,
    UnavailableError,
    UserError,
    from_detail,
)
from meshrl.contract.ports import WeightSink
from meshrl.contract.types import Uint8, Version, WeightManifest
from meshrl.v1 import weights_pb2 as pb
from meshrl.weights.carrier import Carriers, Channel, Link
from meshrl.weights.lora_merging import Merger
from meshrl.weights.messages import (
    CoordinatorStream,
    digest,
    manifest_from_message,
    stamp,
    stamped_version,
    wrong_tensors,
)

logger = logging.getLogger(__name__)

_CLOSING_S = 2.0


class Session:
    """Answers the coordinator, message by message. What is staged is in the engine; nothing else outlives `close`."""

    def __init__(
        self,
        config: WeightsConfig,
        *,
        welcome: pb.PlaneMessage,
        stream: CoordinatorStream,
        carriers: Carriers,
        engine: WeightSink,
        version: Callable[[], Version | None],
        commit: Callable[[Version, int], Awaitable[float]],
        merger: Merger,
    ) -> None:
        self._config = config
        self._run = welcome.stamp.run
        self._epoch = welcome.stamp.epoch
        self._generation = welcome.stamp.generation
        self._stream = stream
        self._carriers = carriers
        self._engine = engine
        self._version = version
        self._switch_engine = commit
        self._merger = merger
        self._channels: dict[str, Channel] = {}
        self._channel: Channel | None = None
        """The one that carries the proposed version."""
        self._manifest: WeightManifest | None = None
        self._buckets: list[Uint8] = []
        self._missing: set[int] = set()
        self._staged: Version | None = None
        self._staged_bytes = 0
        self.failure: MeshError | None = None
        """The error on this side, if one ended the session."""

    @staticmethod
    def raise_if_dismissed(message: pb.PlaneMessage) -> None:
        """Raise the reason when the coordinator removes this replica."""
        if message.WhichOneof("body") == "abort" and message.abort.final:
            raise from_detail(message.abort.code, message.abort.message, {})

    async def run(self) -> None:
        """Answer the coordinator's messages, in order, for as long as the stream lasts.

        Raises:
            MeshError: what failed here; the coordinator has been sent it.
        """
        while True:
            # Waits until the next version: `read_loop` has the deadline.
            message = await self._stream.receive()
            body = message.WhichOneof("body")
            version = stamped_version(message.stamp)
            try:
                await self._answer(message, body or "nothing", version)
            except MeshError as error:
                self.failure = error
                failed = pb.ReplicaFailed(code=error.code, message=str(error))
                await self._send(version, failed=failed)
                # The coordinator answers by closing the stream; closing it here first would cancel the message.
                await asyncio.sleep(_CLOSING_S)
                raise

    async def close(self) -> None:
        """Discard what is not committed; idempotent."""
        for channel in self._channels.values():
            await channel.close()
        await self._discard()

    async def _answer(self, message: pb.PlaneMessage, body: str, version: Version) -> None:
        if body == "propose":
            await self._propose(message)
        elif body == "transfer":
            await self._transfer(version, message.transfer.buckets)
        elif body == "commit":
            await self._commit(version)
        elif body == "abort":
            await self._discard()
        else:
            raise InfraError(f"the coordinator sent {body}, which this process does not know")

    async def _propose(self, message: pb.PlaneMessage) -> None:
        manifest = manifest_from_message(message.stamp, message.propose.manifest)
        serving = self._version()
        if manifest.version.epoch != self._epoch or (serving and manifest.version < serving):
            raise FencedError(f"version {manifest.version} was proposed to an engine at {serving}")
        await self._discard()
        self._manifest = manifest
        # Fresh memory for each version: an engine may keep these very arrays until, and after, the commit.
        self._buckets = [np.empty(nbytes, dtype=np.uint8) for nbytes in manifest.bucket_bytes]
        self._missing = set(range(len(self._buckets)))
        self._channel = await self._open_channel(message.propose)
        await self._send(manifest.version, ready=pb.ReplicaReady())

    async def _open_channel(self, proposed: pb.PlanePropose) -> Channel:
        """This end of the channel, open, by the carrier that the coordinator chose."""
        channel = self._channels.get(proposed.carrier)
        if channel is not None:
            return channel
        link = Link(
            run=self._run,
            epoch=self._epoch,
            generation=self._generation,
            endpoint=proposed.endpoint,
            rank=1,
        )
        channel = self._channels[proposed.carrier] = self._carriers[proposed.carrier].channel(link)
        try:
            await channel.open(self._config.ready_s)
        except UserError as error:
            if len(self._carriers.names) == 1:
                raise
            raise UnavailableError(str(error)) from error  # another carrier can be tried
        return channel

    async def _transfer(self, version: Version, indices: Sequence[int]) -> None:
        manifest = self._manifest
        if manifest is None or manifest.version != version or self._channel is None:
            raise ConflictError(f"buckets of version {version}, which was not proposed")
        for index in indices:
            received_hash = ""
            try:
                mapped = await self._channel.receive(manifest, index, self._buckets[index])
                if mapped is not None:
                    self._buckets[index] = mapped
                received_hash = await asyncio.to_thread(digest, self._buckets[index])
            except CorruptError:
                received_hash = ""  # no bucket has this hash: the coordinator sends it again
            if received_hash == manifest.bucket_hashes[index]:
                self._missing.discard(index)
            elif received_hash:
                wrong = await asyncio.to_thread(
                    wrong_tensors, manifest, index, self._buckets[index]
                )
                logger.warning("weights %s arrived wrong: %s", version, wrong)
            received = pb.ReplicaReceived(bucket=index, hash=received_hash)
            await self._send(version, received=received)
        if not self._missing:
            await self._stage(manifest)

    async def _stage(self, manifest: WeightManifest) -> None:
        self._staged = manifest.version
        served, buckets = manifest.served, self._buckets
        if manifest.adapter is not None:
            buckets = await asyncio.to_thread(self._merger.merge, manifest, buckets)
        try:
            await self._engine.stage_weights(served, buckets)
        except MeshError:
            raise
        except Exception as error:  # an engine's library may raise anything
            raise InfraError(f"staging weights {manifest.version}: {error!r}") from error
        self._manifest, self._buckets = None, []
        self._staged_bytes = served.total_bytes
        prepared = pb.ReplicaPrepared(hashes=served.bucket_hashes)
        await self._send(manifest.version, prepared=prepared)

    async def _commit(self, version: Version) -> None:
        pause_s = 0.0
        if self._version() != version:  # committing twice is committing once
            if self._staged != version:
                raise ConflictError(
                    f"version {version} should be committed, but {self._staged} is staged"
                )
            self._staged = None
            pause_s = await self._switch_engine(version, self._staged_bytes)
        for channel in self._channels.values():
            channel.committed(version)
        await self._send(version, committed=pb.ReplicaCommitted(pause_s=pause_s))

    async def _discard(self) -> None:
        self._manifest, self._buckets = None, []
        if self._staged is not None:
            staged, self._staged = self._staged, None
            await self._engine.discard_weights(staged)

    async def _send(self, version: Version, **body: object) -> None:
        about = stamp(self._run, self._generation, version)
        await self._stream.send(pb.ReplicaMessage(stamp=about, **body))  # type: ignore[arg-type]
