"""Only what changed, over gRPC: patches against the version that a replica was last committed to.

    trainer   send(bucket) ─offer─▶ PatchSender ◀── Fetch(version, bucket, "I hold 1.6") ── PatchReceiver   replica
                                         │                                                       │
                  PatchCache 1.6 → 1.7 ──┴──▶ parts of 4 MiB: a patch, or the bucket whole ──▶ applied to its 1.6

The replica names the version that its engine was committed to, so a version that failed half-way is never a base. It
gets a bucket whole when it holds nothing that the trainer still has (it joined, it was started again), when too much
has changed, and when a bucket arrived damaged: the coordinator hashes what comes out. A patch is encoded once for all
replicas that have the same version. The endpoint holds a secret that authorises a replica; it travels over the
coordinator's stream.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import grpc
import numpy as np
from typing_extensions import override

from meshrl.config.weights import WeightsConfig
from meshrl.contract.errors import (
    ConfigError,
    CorruptError,
    ForbiddenError,
    NotFoundError,
    UnavailableError,
    UserError,
    WaitTimeoutError,
)
from meshrl.contract.ports import WeightSource
from meshrl.contract.types import Uint8, Version, WeightManifest
from meshrl.rpc import credentials, tls
from meshrl.rpc.clients.services import WeightPatchesTable
from meshrl.rpc.errors import from_rpc
from meshrl.rpc.interceptors import Context
from meshrl.rpc.runtime import GrpcServer, ServerSettings
from meshrl.rpc.servicers import TableServicer
from meshrl.rpc.transport import CHANNEL_OPTIONS
from meshrl.v1 import weight_patches_pb2 as pb
from meshrl.v1 import weight_patches_pb2_grpc as rpc
from meshrl.weights.carrier import Channel, Link, Moved, RunPaths
from meshrl.weights.delta import apply
from meshrl.weights.delta.patches import Held, PatchCache
from meshrl.weights.transport import Pairs
from meshrl.weights.waiting import WorkerThread, within

PART_BYTES: Final = 4 << 20
"""Bytes per message: the fastest of 256 KiB to 16 MiB over Python's gRPC."""
_Key = tuple[Version, int]
_Write = Callable[[pb.WeightPatchPart], Awaitable[Any]]
_T = TypeVar("_T")

logger = logging.getLogger(__name__)


class Carrier(Pairs):
    """On the trainer's side a server and the patches; on a replica's, the buckets that it holds."""

    def __init__(self, config: WeightsConfig, paths: RunPaths) -> None:
        super().__init__(config)
        self.serving: Version | None = None
        """The newest version that a replica was committed to; one that joins again may hold it, too."""
        self._secret = secrets.token_urlsafe(16)
        self._closing = AsyncExitStack()
        self._senders: dict[int, PatchSender] = {}
        self._held = Held()
        self.patches = PatchCache()

    @override
    async def listen(self) -> str:
        """Open the server; returns `host:port#secret`. Raises ConfigError when it cannot."""
        settings = ServerSettings(
            host=self.config.host,
            port=self.config.port,
            metrics_port=None,
            drain_grace_s=0,
            tls=tls.in_use(),
            authenticated=True,  # by the secret
            verifiers=credentials.verifiers_in_use(),
        )
        try:
            server = await self._closing.enter_async_context(
                GrpcServer(settings, [PatchServicer(self)])
            )
        except UserError as error:
            raise ConfigError(f"weights.host/port: {error}") from error
        return f"{server.address}#{self._secret}"

    @override
    async def stage(self, source: WeightSource) -> None:
        """Keep the version, and those that replicas serve, in memory: they are the bases of patches."""
        serving = {sender.base for sender in self._senders.values()} | {self.serving}
        self.patches.add(source, (version for version in serving if version is not None))

    @override
    def channel(self, link: Link) -> Channel:
        if link.rank != 0:
            return PatchReceiver(self.config, link, self._held)
        sender = self._senders[link.generation] = PatchSender(self, link)
        return sender

    def forget(self, generation: int) -> None:
        """Forget a closed channel; idempotent."""
        self._senders.pop(generation, None)

    @override
    async def close(self) -> None:
        """End the server and everything that it is sending; idempotent."""
        await self._closing.aclose()
        await self.patches.close()

    async def serve(self, request: pb.WeightPatchRequest, write: _Write) -> None:
        """Answer a `Fetch`.

        Raises:
            ForbiddenError: the request does not hold the secret.
            NotFoundError: there is no such channel, or no longer.
        """
        if not secrets.compare_digest(request.secret.encode(), self._secret.encode()):
            raise ForbiddenError("a request for weights without the secret of this endpoint")
        sender = self._senders.get(request.generation)
        if sender is None or sender.link.run != request.run:
            raise NotFoundError(
                f"no weight channel {request.run!r}, generation {request.generation}"
            )
        await sender.serve(request, write)


class PatchServicer(TableServicer, table=WeightPatchesTable):
    """The stream of a patch."""

    def __init__(self, carrier: Carrier) -> None:
        super().__init__()
        self._carrier = carrier

    # A coroutine that writes, so that the write of a part that nobody reads runs into its deadline.
    async def Fetch(self, request: pb.WeightPatchRequest, context: Context) -> None:
        """One bucket."""
        await self._carrier.serve(request, context.write)


@dataclass(frozen=True, slots=True)
class _Offer:
    key: _Key
    manifest: WeightManifest
    bucket: Uint8
    whole: bool


class PatchSender(Channel):
    """The trainer's end: offers one bucket after the other, and waits until each is fetched.

    Unblocked by the fetch, by its failure, or by `abort`; all are announced through one event.
    """

    def __init__(self, carrier: Carrier, link: Link) -> None:
        self.link = link
        self.base: Version | None = None
        """The version that the replica was last committed to."""
        self._carrier = carrier
        self.config = carrier.config
        self._sent = Moved()
        self._offer: _Offer | None = None
        self._failure = ""
        self._changed = asyncio.Event()

    @override
    async def send(self, manifest: WeightManifest, index: int, bucket: Uint8) -> None:
        """Offer a bucket until the replica has fetched it; a second time, whole. Raises UnavailableError."""
        version = manifest.version
        again = self._sent.again(version, index)
        offer = self._offer = _Offer((version, index), manifest, bucket, whole=again)
        self._notify()
        try:
            # No deadline here: the coordinator has one for the acknowledgement.
            await self._until(lambda: self._offer is not offer)
        finally:
            self._offer = None if self._offer is offer else self._offer

    async def serve(self, request: pb.WeightPatchRequest, write: _Write) -> None:
        """Write the requested bucket as soon as it is offered.

        Raises:
            UserError: the request names no version.
            UnavailableError: the channel is closed.
            WaitTimeoutError: the bucket is not offered, or not taken.
        """
        key = _version(request.version), request.bucket
        base = _version(request.base) if request.base else None
        wanted = self._until(lambda: self._offer is not None and self._offer.key == key)
        await within(wanted, self.config.ready_s, f"the offer of bucket {key[1]}")
        offer = self._offer
        assert offer is not None
        try:
            await self._write(offer, base, write)
        except BaseException:
            self._fail("the replica closed the connection while it fetched")
            raise
        if self._offer is offer:
            self._offer = None
            self._notify()

    async def _write(self, offer: _Offer, base: Version | None, write: _Write) -> None:
        patch = None
        if not offer.whole:
            patches, index = self._carrier.patches, offer.key[1]
            patch = await patches.patch(base, offer.manifest, index, offer.bucket)
        content = offer.bucket.data if patch is None else memoryview(patch)
        for start in range(0, len(content), PART_BYTES):
            piece = bytes(content[start : start + PART_BYTES])
            part = pb.WeightPatchPart(whole=patch is None, data=piece)
            deadline_s = self.config.deadline_s(len(piece))
            await within(write(part), deadline_s, f"{self.link.prefix}: sending a part")

    @override
    def committed(self, version: Version) -> None:
        """Set the base of the replica's next patches."""
        self.base = version
        self._carrier.serving = max(self._carrier.serving or version, version)

    @override
    def abort(self) -> None:
        """End every wait here, on both sides of an offer."""
        self._fail("closed")

    def _fail(self, reason: str) -> None:
        self._failure = self._failure or reason
        self._carrier.forget(self.link.generation)
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            if self._failure:
                raise UnavailableError(f"weight channel {self.link.prefix}: {self._failure}")
            await self._changed.wait()


class PatchReceiver(Channel):
    """A replica's end: asks for each bucket, names the version that it holds, and applies the patch."""

    def __init__(self, config: WeightsConfig, link: Link, held: Held) -> None:
        self.config = config
        self._link = link
        self._held = held
        self._address, _, self._secret = link.endpoint.rpartition("#")
        self._thread = WorkerThread(f"weights-delta-{link.generation}")
        self._channel: grpc.aio.Channel | None = None
        self._call: grpc.aio.UnaryStreamCall[pb.WeightPatchRequest, pb.WeightPatchPart] | None = (
            None
        )
        self._requested = Moved()
        self.moved_bytes = 0
        """Bytes sent for the last received bucket: of its patch, or its own."""

    @override
    async def open(self, deadline_s: float) -> None:
        """Reach the trainer's process. Raises UnavailableError."""
        self._channel = tls.channel(self._address, CHANNEL_OPTIONS)
        try:
            await within(self._channel.channel_ready(), deadline_s, "the connection")
        except WaitTimeoutError as error:
            raise UnavailableError(f"weights at {self._address}: {error}") from error

    @override
    async def receive(self, manifest: WeightManifest, index: int, into: Uint8) -> None:
        """Fill `into`, from a patch of the held bucket or with the bucket itself. Raises WaitTimeoutError too."""
        version = manifest.version
        if self._requested.again(version, index):
            logger.warning("bucket %d of weights %s arrived damaged: asking again", index, version)
            self._held.forget()
        base = self._held.base(manifest, index)
        patch = await self._fetch(manifest, index, base[0] if base else None, into)
        if patch is not None:
            await self._thread.run(apply, base[1] if base else None, patch, into)
        self._held.arrived(manifest, index, into)

    @override
    def committed(self, version: Version) -> None:
        """Make the received buckets of `version` the base of the next patches."""
        self._held.commit(version)

    @override
    def abort(self) -> None:
        self._thread.close()
        if self._call is not None:
            self._call.cancel()

    @override
    async def close(self) -> None:
        """Cancel the call and disconnect; the held buckets stay, for the next channel."""
        self.abort()
        if self._channel is not None:
            await self._channel.close(None)

    async def _fetch(
        self, manifest: WeightManifest, index: int, base: Version | None, into: Uint8
    ) -> bytearray | None:
        """A patch; or None, and the bucket itself is in `into`."""
        assert self._channel is not None, "the channel is not open"
        request = pb.WeightPatchRequest(
            secret=self._secret,
            run=self._link.run,
            generation=self._link.generation,
            version=str(manifest.version),
            bucket=index,
            base=str(base) if base else "",
        )
        call = self._call = rpc.WeightPatchesStub(self._channel).Fetch(request)
        deadline_s, what = self.config.deadline_s(into.nbytes), f"bucket {index} of weights"
        patch: bytearray | None = None
        filled = 0
        try:
            while isinstance(
                part := await within(call.read(), deadline_s, what), pb.WeightPatchPart
            ):
                size = len(part.data)
                if filled + size > into.nbytes or (patch is not None and part.whole):
                    raise CorruptError(f"{what}: more than its {into.nbytes} bytes")
                if part.whole:
                    into[filled : filled + size] = np.frombuffer(part.data, dtype=np.uint8)
                else:
                    patch = bytearray() if patch is None else patch
                    patch += part.data
                filled += size
        except grpc.aio.AioRpcError as error:
            raise from_rpc(error, f"weights at {self._address}") from error
        finally:
            call.cancel()
        self.moved_bytes = filled
        if patch is None and filled != into.nbytes:
            raise CorruptError(f"{what}: {filled} of its {into.nbytes} bytes")
        return patch


def _version(text: str) -> Version:
    """Raises UserError."""
    try:
        return Version.parse(text)
    except ValueError as error:
        raise UserError(f"{text!r} is not a version") from error
