"""Translates between the weight plane's protobuf messages and the contract's types, and streams them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final, Generic, TypeVar
from weakref import WeakKeyDictionary

import grpc
import xxhash

from meshrl.common import chunk_digest as chunks
from meshrl.contract import codec
from meshrl.contract.errors import CorruptError, InfraError, UnavailableError
from meshrl.contract.ports import GatheredSource, WeightSource
from meshrl.contract.types import Adapter, TensorSpec, Uint8, Version, WeightManifest
from meshrl.rpc.interceptors import Context
from meshrl.v1 import weights_pb2 as pb
from meshrl.v1 import weights_pb2_grpc
from meshrl.weights.carrier import Link, host_id
from meshrl.weights.waiting import within

_T = TypeVar("_T")
TENSOR: Final = codec.Codec(TensorSpec, pb.WeightTensor)


def digest(bucket: Uint8) -> str:
    """xxh3-128 of a bucket, hexadecimal."""
    return xxhash.xxh3_128_hexdigest(bucket.data)


def tensor_digest(bucket: Uint8, tensor: TensorSpec) -> int:
    """xxh3-64 of one tensor in its bucket."""
    return xxhash.xxh3_64_intdigest(bucket.data[tensor.offset : tensor.offset + tensor.nbytes])


def hashes_of(manifest: WeightManifest) -> dict[int, tuple[str, Sequence[int]]]:
    """Hashes of each bucket and its tensors; empty while the version is being gathered."""
    of_tensors: dict[int, list[int]] = {}
    for tensor, known in zip(manifest.tensors, manifest.tensor_hashes, strict=False):
        of_tensors.setdefault(tensor.bucket, []).append(known)
    return {
        index: (known, of_tensors.get(index, ()))
        for index, known in enumerate(manifest.bucket_hashes)
    }


def wrong_tensors(
    manifest: WeightManifest, index: int, bucket: Uint8, hashes: Sequence[int]
) -> str:
    """Names the tensors of a bucket whose bytes have other hashes than these, for an error message."""
    tensors = [tensor for tensor in manifest.tensors if tensor.bucket == index]
    if len(hashes) != len(tensors):
        return f"bucket {index}"
    pairs = zip(tensors, hashes, strict=True)
    names = [t.name for t, h in pairs if tensor_digest(bucket, t) != h]
    if not names:
        return f"bucket {index}, between its tensors"
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"bucket {index}: {names[0]}{more}"


class SourceError(CorruptError):
    """The source's bytes differ from its manifest, or never came: the replicas are not the cause."""


async def gathered(source: WeightSource, index: int) -> tuple[str, Sequence[int]]:
    """Return once a bucket is there, with its hash and those of its tensors. Raises SourceError."""
    if not isinstance(source, GatheredSource):
        return hashes_of(source.manifest)[index]
    try:
        return await source.gathered(index)
    except Exception as error:
        raise SourceError(
            f"weights {source.manifest.version} were not gathered: {error}"
        ) from error


def is_whole(source: WeightSource) -> bool:
    """Whether all buckets are there: then the manifest has their hashes."""
    return bool(source.manifest.bucket_hashes)


_digests: WeakKeyDictionary[WeightSource, dict[int, asyncio.Future[str]]] = WeakKeyDictionary()


async def chunk_digest(source: WeightSource, index: int) -> str:
    """Digest of a gathered bucket; made once, when the first replica that receives on a device asks."""
    made = _digests.setdefault(source, {})
    if index not in made:
        made[index] = asyncio.ensure_future(asyncio.to_thread(chunks.digest, source.bucket(index)))
    return await asyncio.shield(made[index])


async def whole(source: WeightSource) -> None:
    """Return once all buckets are there. Raises SourceError."""
    for index in range(len(source.manifest.bucket_bytes)):
        await gathered(source, index)


def check_source(
    index: int, source: WeightSource, expected: str, tensor_hashes: Sequence[int]
) -> None:
    """Raises SourceError for a bucket that is not what its hash says: before it is sent again."""
    manifest, actual = source.manifest, digest(source.bucket(index))
    if actual != expected:
        wrong = wrong_tensors(manifest, index, source.bucket(index), tensor_hashes)
        raise SourceError(
            f"bucket {index} of weights {manifest.version} has hash {actual}, its manifest says "
            f"{expected}: the trainer's memory changed after the version was made ({wrong})"
        )


def stamp(run: str, generation: int, version: Version | None) -> pb.WeightStamp:
    """Stamp of a message: run, generation, and the version, 0.0 where there is none."""
    epoch, step = (version.epoch, version.step) if version is not None else (0, 0)
    return pb.WeightStamp(run=run, generation=generation, epoch=epoch, step=step)


def stamped_version(message: pb.WeightStamp) -> Version:
    """The version in a stamp."""
    return Version(message.epoch, message.step)


def manifest_to_message(manifest: WeightManifest) -> pb.WeightManifest:
    """The protobuf form; run and version travel in the stamp."""
    message = pb.WeightManifest(
        tensors=map(TENSOR.encode, manifest.tensors),
        bucket_bytes=manifest.bucket_bytes,
        bucket_hashes=manifest.bucket_hashes,
        tensor_hashes=manifest.tensor_hashes,
    )
    if (adapter := manifest.adapter) is not None:
        message.adapter.CopyFrom(
            pb.WeightAdapter(
                base=adapter.base,
                rank=adapter.rank,
                scale=adapter.scale,
                targets=adapter.targets,
                merged=manifest_to_message(adapter.merged),
            )
        )
    return message


def manifest_from_message(about: pb.WeightStamp, message: pb.WeightManifest) -> WeightManifest:
    """The inverse of `manifest_message`."""
    adapter = None
    if message.HasField("adapter"):
        sent = message.adapter
        adapter = Adapter(
            base=sent.base,
            rank=sent.rank,
            scale=sent.scale,
            targets=tuple(sent.targets),
            merged=manifest_from_message(about, sent.merged),
        )
    return WeightManifest(
        run=about.run,
        version=stamped_version(about),
        tensors=tuple(map(TENSOR.decode, message.tensors)),
        bucket_bytes=tuple(message.bucket_bytes),
        bucket_hashes=tuple(message.bucket_hashes),
        tensor_hashes=tuple(message.tensor_hashes),
        adapter=adapter,
    )


_Received = TypeVar("_Received", bound=pb.ReplicaMessage | pb.PlaneMessage)
_Sent = TypeVar("_Sent", bound=pb.ReplicaMessage | pb.PlaneMessage)


class MessageStream(Generic[_Received, _Sent]):
    """One end of the stream between coordinator and replica: ordered, with heartbeats.

    `read` returns None when the other side has closed the stream; `write` raises UnavailableError when it has.
    """

    def __init__(
        self,
        read: Callable[[], Awaitable[_Received | None]],
        write: Callable[[_Sent], Awaitable[None]],
        silence_s: float,
    ) -> None:
        self._read = read
        self._write = write
        self.silence_s = silence_s
        self._writing = asyncio.Lock()
        self._inbox: asyncio.Queue[_Received] = asyncio.Queue()
        self._clock = asyncio.get_running_loop().time
        self._heard = self._clock()

    @property
    def quiet_s(self) -> float:
        """Seconds since the last message, or heartbeat, of the other side."""
        return self._clock() - self._heard

    async def send(self, message: _Sent) -> None:
        """Send one message. Raises UnavailableError, WaitTimeoutError."""
        async with self._writing:
            await within(self._write(message), self.silence_s, "sending to the other side")

    async def receive(self) -> _Received:
        """The next message that `read_loop` has read; the deadline is the caller's, or that of `read_loop`."""
        return await self._inbox.get()

    async def read(self) -> _Received:
        """Read one message directly, for the greeting, before `read_loop` runs.

        Raises:
            UnavailableError: the other side closed the stream.
            WaitTimeoutError: it has sent nothing, not even a heartbeat, for `silence_s`.
        """
        message = await within(self._read(), self.silence_s, "a sign of life of the other side")
        if message is None:
            raise UnavailableError("the other side closed the stream")
        self._heard = self._clock()
        return message

    async def read_loop(self, generation: int, inspect: Callable[[_Received], bool]) -> None:
        """Read until the other side closes the stream or falls silent. Drops messages of other generations.

        `inspect` is called with each message as it arrives, and may raise to end the loop; `receive` gives only those
        for which it returns False.
        """
        while True:
            message = await self.read()
            mine = message.WhichOneof("body") != "beat" and message.stamp.generation == generation
            if mine and not inspect(message):
                self._inbox.put_nowait(message)

    async def heartbeat_loop(self, message: Callable[[], _Sent], every_s: float) -> None:
        """Send what `message` gives at once and every `every_s` seconds, for ever."""
        while True:
            await self.send(message())
            await asyncio.sleep(every_s)


ReplicaStream = MessageStream[pb.ReplicaMessage, pb.PlaneMessage]
"""The coordinator's end."""
CoordinatorStream = MessageStream[pb.PlaneMessage, pb.ReplicaMessage]
"""The replica's end."""


def _whole(write: Callable[[_Sent], Awaitable[None]]) -> Callable[[_Sent], Awaitable[None]]:
    """`write`, but a caller that is cancelled cuts no message off, and the next one waits for its end.

    gRPC refuses a second message while one is on its way; and a client whose write is cancelled ends the call.
    """
    last: asyncio.Future[None] | None = None

    async def written(message: _Sent) -> None:
        nonlocal last
        if last is not None:
            await asyncio.wait([last])
        last = asyncio.ensure_future(write(message))
        last.add_done_callback(lambda done: done.cancelled() or done.exception())
        await asyncio.shield(last)

    return written


def stream_to_replica(
    requests: AsyncIterator[pb.ReplicaMessage], context: Context, silence_s: float
) -> ReplicaStream:
    """The coordinator's end of one call of `Join`."""

    async def read() -> pb.ReplicaMessage | None:
        return await anext(requests, None)

    async def write(message: pb.PlaneMessage) -> None:
        try:
            await context.write(message)
        except grpc.aio.BaseError as error:
            raise UnavailableError(f"the replica's stream is closed: {error}") from error

    return MessageStream(read, _whole(write), silence_s)


def stream_to_coordinator(channel: grpc.aio.Channel, silence_s: float) -> CoordinatorStream:
    """Calls `Join`; returns the replica's end."""
    call = weights_pb2_grpc.WeightsStub(channel).Join(None)

    async def read() -> pb.PlaneMessage | None:
        try:
            message = await call.read()
        except grpc.aio.AioRpcError as error:
            raise UnavailableError(f"{error.code().name}: {error.details()}") from error
        return message if isinstance(message, pb.PlaneMessage) else None

    async def write(message: pb.ReplicaMessage) -> None:
        try:
            await call.write(message)
        except (grpc.aio.AioRpcError, grpc.aio.BaseError, asyncio.InvalidStateError) as error:
            reason = error.details() if isinstance(error, grpc.aio.AioRpcError) else error
            raise UnavailableError(f"the trainer's stream is closed: {reason}") from error

    return MessageStream(read, _whole(write), silence_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """A replica as it described itself."""

    name: str
    host: str
    """See `carrier.host_id`."""
    carriers: tuple[str, ...]

    @property
    def shares_memory(self) -> bool:
        """Whether it is on this host."""
        return self.host == host_id() != ""


class Receiver:
    """One joining of a replica, as deliveries speak to it."""

    def __init__(self, peer: Peer, link: Link, stream: ReplicaStream) -> None:
        self.peer = peer
        self.link = link
        """The trainer's end, without an endpoint."""
        self.stream = stream
        self.suspect = False
        """Half of a deadline has passed."""
        self._proposed: tuple[Version, int] | None = None
        """The version of the last PROPOSE, and the group."""

    async def propose(self, version: Version, proposal: pb.PlanePropose) -> None:
        """Send PROPOSE: READY and RECEIVED of earlier ones are dropped from now on."""
        self._proposed = version, proposal.group
        await self.say(version, propose=proposal)

    async def say(self, version: Version, **body: object) -> None:
        """Send a message about a version. Raises UnavailableError, WaitTimeoutError."""
        about = stamp(self.link.run, self.link.generation, version)
        await self.stream.send(pb.PlaneMessage(stamp=about, **body))  # type: ignore[arg-type]

    async def hear(self, kind: str) -> pb.ReplicaMessage:
        """The next message, which is of this kind; the caller has the deadline. Raises InfraError."""
        while True:
            message = await self.stream.receive()
            body = message.WhichOneof("body")
            if body not in ("ready", "received", "prepared"):
                break
            # Neither of a version that was withdrawn, nor of a group that was left.
            version, group = self._proposed or (None, 0)
            if stamped_version(message.stamp) == version and (
                body == "prepared" or getattr(message, body).group == group
            ):
                break
        if body != kind:
            raise InfraError(f"{self.peer.name}: sent {body}, not {kind}")
        return message

    async def progressing(self, work: Awaitable[_T], deadline_s: float, what: str) -> _T:
        """The result of `work`. Raises WaitTimeoutError."""
        result = await within(work, deadline_s, f"{self.peer.name}: {what}", self._mark_suspect)
        self.suspect = False
        return result

    def _mark_suspect(self) -> None:
        self.suspect = True
