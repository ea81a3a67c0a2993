"""The replica's end of one joining: from the first PROPOSE to the end of the stream."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np

from meshrl.common import shared_buffers
from meshrl.config.weights import WeightsConfig
from meshrl.contract.errors import (
    CapacityError,
    ConflictError,
    CorruptError,
    FencedError,
    InfraError,
    MeshError,
    UnavailableError,
    UserError,
    from_detail,
)
from meshrl.contract.ports import (
    AdapterSink,
    LendingSink,
    LentBucket,
    PinningSink,
    WeightSink,
)
from meshrl.contract.types import Uint8, Version, WeightManifest
from meshrl.v1 import weights_pb2 as pb
from meshrl.weights.carrier import Carriers, Channel, DeviceChannel, Link
from meshrl.weights.lora_merging import Merger
from meshrl.weights.messages import (
    CoordinatorStream,
    digest,
    hashes_of,
    manifest_from_message,
    stamp,
    stamped_version,
    wrong_tensors,
)
from meshrl.weights.waiting import unless

logger = logging.getLogger(__name__)

_CLOSING_S = 2.0
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, eq=False)
class Incoming:
    """A version while it arrives."""

    manifest: WeightManifest
    buckets: list[Uint8]
    missing: set[int]
    hashes: dict[int, tuple[str, Sequence[int]]]
    """Hashes of each bucket and of its tensors, as far as the trainer has said them."""
    lent: list[LentBucket] = field(default_factory=list)
    """Memory of a device in which they arrive, in place of `buckets`; none: on the host."""
    digests: dict[int, str] = field(default_factory=dict)
    """Chunk digests, for those that arrive on a device."""

    @property
    def version(self) -> Version:
        """The version."""
        return self.manifest.version


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
        leave: Callable[[], None],
    ) -> None:
        """`leave` begins to end this process, when the operator wants that."""
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
        self._leave = leave
        self._channels: dict[str, Channel] = {}
        """Channels of two ends, by carrier."""
        self._group_channel: Channel | None = None
        """The channel of more than two ends."""
        self._channel: Channel | None = None
        """The one that carries the proposed version."""
        self._group = 0
        """The number of its group; 0: it has two ends."""
        self._proposals = 0
        """That have arrived, and wait for what is done now."""
        self._proposed = asyncio.Event()
        """One waits."""
        self._incoming: Incoming | None = None
        """The proposed version, until it is staged."""
        self._staged: Version | None = None
        self._staged_bytes = 0
        self.failure: MeshError | None = None
        """The error on this side, if one ended the session."""

    def inspect(self, message: pb.PlaneMessage) -> bool:
        """Look at a message as it arrives, whatever this session waits for; True if it is answered.

        Raises the reason when the coordinator removes this replica.
        """
        body = message.WhichOneof("body")
        if body == "abort" and message.abort.final:
            raise from_detail(message.abort.code, message.abort.message, {})
        if body == "leave":
            self._leave()
            return True
        if body == "propose":
            self._proposals += 1
            self._proposed.set()
        return False

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
        for channel in self._all_channels():
            await channel.close()
        await self._discard()

    async def _answer(self, message: pb.PlaneMessage, body: str, version: Version) -> None:
        if body == "propose":
            await self._propose(message)
        elif body == "transfer":
            await self._transfer(version, message.transfer)
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
        self._proposals -= 1
        if not self._proposals:
            self._proposed.clear()
        if self._incoming is None or not _same(self._incoming.manifest, manifest):
            await self._discard()
            every = range(len(manifest.bucket_bytes))
            empty = [np.empty(0, np.uint8) for _ in every]
            self._incoming = Incoming(manifest, empty, set(every), {})
        self._incoming.hashes.update(hashes_of(manifest))
        incoming, ready = self._incoming, pb.ReplicaReady(group=message.propose.group)
        try:
            self._channel = await self._open_channel(message.propose)
        except UnavailableError as error:
            if not message.propose.group:
                raise
            ready.error = str(error)
        else:
            await self._make_room(incoming, self._channel)
            ready.held.extend(sorted(set(range(len(incoming.buckets))) - incoming.missing))
            ready.chunk_digests = bool(incoming.lent)
        await self._send(manifest.version, ready=ready)

    async def _make_room(self, incoming: Incoming, channel: Channel) -> None:
        """Memory for what is missing: of the engine's device where that lends to this channel, or of the host."""
        manifest = incoming.manifest
        lent = await self._lent(manifest, channel)
        if lent != incoming.lent:  # what it holds lies elsewhere
            incoming.missing.update(range(len(incoming.buckets)))
            incoming.lent[:] = lent
        if lent:
            return
        # Fresh for each version: an engine may keep these very arrays until, and after, the commit. And for each
        # channel: the one before may still write into what it has not finished.
        indices = sorted(incoming.missing)
        sizes = [manifest.bucket_bytes[index] for index in indices]
        pin = self._engine.pin if isinstance(self._engine, PinningSink) else None
        try:
            memory = shared_buffers.allocate(sizes, pin)
        except OSError as error:
            raise CapacityError(f"no memory for weights {manifest.version}: {error}") from error
        for index, bucket in zip(indices, memory, strict=True):
            incoming.buckets[index] = bucket

    async def _lent(self, manifest: WeightManifest, channel: Channel) -> list[LentBucket]:
        """What the engine lends; an adapter that is merged here has to be on the host."""
        if not isinstance(channel, DeviceChannel) or not isinstance(self._engine, LendingSink):
            return []
        receiver = channel.device
        if receiver is None or manifest.adapter is not None:
            return []
        await receiver.settle()
        return [*await self._engine.lend(manifest, receiver)]

    async def _open_channel(self, proposed: pb.PlanePropose) -> Channel:
        """This end of the channel, open, by the carrier and to the ends that the coordinator chose."""
        if self._group_channel is not None:
            if self._group == proposed.group:
                return self._group_channel
            self._group_channel.abort()
            self._group_channel = None
        self._group = proposed.group
        if not proposed.group and proposed.carrier in self._channels:
            return self._channels[proposed.carrier]
        if proposed.group and (alone := self._channels.pop(proposed.carrier, None)) is not None:
            alone.abort()
        link = Link(
            run=self._run,
            epoch=self._epoch,
            generation=self._generation,
            endpoint=proposed.endpoint,
            group=proposed.group,
            rank=proposed.rank or 1,
            size=proposed.size or 2,
        )
        channel = self._carriers[proposed.carrier].channel(link)
        if proposed.group:
            self._group_channel = channel
        else:
            self._channels[proposed.carrier] = channel
        try:
            await self._unless_proposed(channel.open(self._config.ready_s))
        except UserError as error:
            if len(self._carriers.names) == 1:
                raise
            self._carriers.give_up(proposed.carrier)  # the next joining offers the others
            raise UnavailableError(str(error)) from error
        return channel

    async def _unless_proposed(self, work: Awaitable[_T]) -> _T:
        """Await work of the channel, until the coordinator names another one."""
        return await unless(self._proposed, work, "another channel is named")

    def _all_channels(self) -> list[Channel]:
        every = [*self._channels.values()]
        return every if self._group_channel is None else [*every, self._group_channel]

    async def _transfer(self, version: Version, transfer: pb.PlaneTransfer) -> None:
        incoming, indices = self._incoming, transfer.buckets
        if incoming is None or incoming.version != version or self._channel is None:
            raise ConflictError(f"buckets of version {version}, which was not proposed")
        for index, expected in zip(indices, transfer.hashes, strict=False):  # one at a time
            incoming.hashes[index] = expected, transfer.tensor_hashes
        incoming.digests.update(zip(indices, transfer.chunk_digests, strict=False))
        for index in indices:
            await self._receive(incoming, index, self._channel)
        # A group is sent what others lack, too; nothing is what it is told when that was all.
        if not incoming.missing and not (self._group and indices):
            await self._stage(incoming)

    async def _receive(self, incoming: Incoming, index: int, channel: Channel) -> None:
        """One bucket; RECEIVED says what came."""
        if incoming.lent and index in incoming.missing:
            await self._receive_lent(incoming, index, channel)
            return
        manifest, buckets = incoming.manifest, incoming.buckets
        if index not in incoming.missing:  # in a group: another one lacks it
            buckets = [*buckets]
            (buckets[index],) = shared_buffers.allocate([manifest.bucket_bytes[index]])
        received = pb.ReplicaReceived(bucket=index, group=self._group)
        try:
            mapped = await self._unless_proposed(channel.receive(manifest, index, buckets[index]))
            if mapped is not None:
                buckets[index] = mapped
            received.moved_bytes = getattr(channel, "moved_bytes", buckets[index].nbytes)
            received.hash = await asyncio.to_thread(digest, buckets[index])
        except CorruptError:
            received.hash = ""  # no bucket has this hash: the coordinator sends it again
        except UnavailableError as error:
            if not self._group:
                raise
            received.error = str(error)
        expected, of_tensors = incoming.hashes.get(index, ("", ()))
        if received.hash and received.hash == expected:
            incoming.missing.discard(index)
        elif received.hash:
            wrong = await asyncio.to_thread(
                wrong_tensors, manifest, index, buckets[index], of_tensors
            )
            logger.warning("weights %s arrived wrong: %s", manifest.version, wrong)
        await self._send(manifest.version, received=received)

    async def _receive_lent(self, incoming: Incoming, index: int, channel: Channel) -> None:
        """One bucket into memory of the device, by a channel that can; RECEIVED says what lies there."""
        assert isinstance(channel, DeviceChannel)
        bucket = incoming.lent[index]
        received = pb.ReplicaReceived(bucket=index, group=self._group)
        try:
            received.hash = await self._unless_proposed(channel.receive_lent(bucket))
            received.moved_bytes = bucket.nbytes
        except UnavailableError as error:
            if not self._group:
                raise
            received.error = str(error)
        if received.hash and received.hash == incoming.digests.get(index):
            incoming.missing.discard(index)
        elif received.hash:
            logger.warning(
                "weights %s arrived wrong: bucket %d, on the device", incoming.version, index
            )
        await self._send(incoming.version, received=received)

    async def _stage(self, incoming: Incoming) -> None:
        buckets = incoming.buckets
        manifest = replace(
            incoming.manifest,
            bucket_hashes=tuple(incoming.hashes[index][0] for index in range(len(buckets))),
        )
        self._staged = manifest.version
        served = manifest.served
        if manifest.adapter is not None:
            if isinstance(self._engine, AdapterSink) and self._engine.serves_adapters:
                await asyncio.to_thread(self._merger.base_of, manifest.adapter)
                served = manifest
            else:
                buckets = await asyncio.to_thread(self._merger.merge, manifest, buckets)
        try:
            if incoming.lent:
                assert isinstance(self._engine, LendingSink)
                digests = [incoming.digests[index] for index in range(len(buckets))]
                await self._engine.stage_lent(served, digests)
            else:
                await self._engine.stage_weights(served, buckets)
        except MeshError:
            raise
        except Exception as error:  # an engine's library may raise anything
            raise InfraError(f"staging weights {manifest.version}: {error!r}") from error
        self._incoming = None
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
        for channel in self._all_channels():
            channel.committed(version)
        await self._send(version, committed=pb.ReplicaCommitted(pause_s=pause_s))

    async def _discard(self) -> None:
        self._incoming = None
        if self._staged is not None:
            staged, self._staged = self._staged, None
            await self._engine.discard_weights(staged)

    async def _send(self, version: Version, **body: object) -> None:
        about = stamp(self._run, self._generation, version)
        await self._stream.send(pb.ReplicaMessage(stamp=about, **body))  # type: ignore[arg-type]


def _same(one: WeightManifest, other: WeightManifest) -> bool:
    """Whether these are of one version, of which the first may have been proposed before it had hashes."""
    if not one.bucket_hashes:
        other = replace(other, bucket_hashes=(), tensor_hashes=())
    return one == other
