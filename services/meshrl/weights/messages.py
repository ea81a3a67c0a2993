"""Between the weight plane's messages and the contract's nouns, and the stream that carries them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

import xxhash

from meshrl.contract.errors import UnavailableError
from meshrl.contract.types import Adapter, TensorSpec, Uint8, Version, WeightManifest
from meshrl.v1 import weights_pb2 as pb
from meshrl.weights.deadlines import within


def digest(bucket: Uint8) -> str:
    """xxh3-128 of a bucket, hexadecimal."""
    return xxhash.xxh3_128_hexdigest(bucket.data)


def tensor_digest(bucket: Uint8, tensor: TensorSpec) -> int:
    """xxh3-64 of one tensor in its bucket."""
    return xxhash.xxh3_64_intdigest(bucket.data[tensor.offset : tensor.offset + tensor.nbytes])


def wrong_tensors(manifest: WeightManifest, index: int, bucket: Uint8) -> str:
    """The tensors of a bucket whose bytes are not the manifest's, for people to read."""
    if len(manifest.tensor_hashes) != len(manifest.tensors):
        return f"bucket {index}"
    told = zip(manifest.tensors, manifest.tensor_hashes, strict=True)
    names = [t.name for t, h in told if t.bucket == index and tensor_digest(bucket, t) != h]
    if not names:
        return f"bucket {index}, between its tensors"
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"bucket {index}: {names[0]}{more}"


def stamp(run: str, generation: int, version: Version | None) -> pb.WeightStamp:
    """What a message is about; no version is 0.0."""
    epoch, step = (version.epoch, version.step) if version is not None else (0, 0)
    return pb.WeightStamp(run=run, generation=generation, epoch=epoch, step=step)


def stamped_version(message: pb.WeightStamp) -> Version:
    """The version in a stamp."""
    return Version(message.epoch, message.step)


def manifest_message(manifest: WeightManifest) -> pb.WeightManifest:
    """A manifest as it is sent; run and version travel in the stamp."""
    tensors = [
        pb.WeightTensor(
            name=tensor.name,
            dtype=tensor.dtype,
            shape=tensor.shape,
            bucket=tensor.bucket,
            offset=tensor.offset,
            nbytes=tensor.nbytes,
        )
        for tensor in manifest.tensors
    ]
    message = pb.WeightManifest(
        tensors=tensors,
        bucket_bytes=manifest.bucket_bytes,
        bucket_hashes=manifest.bucket_hashes,
        tensor_hashes=manifest.tensor_hashes,
    )
    if (adapter := manifest.adapter) is not None:
        message.adapter.CopyFrom(
            pb.WeightAdapter(
                base=adapter.base,
                rank=adapter.rank,
                alpha=adapter.alpha,
                targets=adapter.targets,
                merged=manifest_message(adapter.merged),
            )
        )
    return message


def manifest_noun(about: pb.WeightStamp, message: pb.WeightManifest) -> WeightManifest:
    """The inverse of `manifest_message`."""
    tensors = tuple(
        TensorSpec(
            name=tensor.name,
            dtype=tensor.dtype,
            shape=tuple(tensor.shape),
            bucket=tensor.bucket,
            offset=tensor.offset,
            nbytes=tensor.nbytes,
        )
        for tensor in message.tensors
    )
    return WeightManifest(
        run=about.run,
        version=stamped_version(about),
        tensors=tensors,
        bucket_bytes=tuple(message.bucket_bytes),
        bucket_hashes=tuple(message.bucket_hashes),
        tensor_hashes=tuple(message.tensor_hashes),
        adapter=_adapter_noun(about, message.adapter) if message.HasField("adapter") else None,
    )


def _adapter_noun(about: pb.WeightStamp, message: pb.WeightAdapter) -> Adapter:
    return Adapter(
        base=message.base,
        rank=message.rank,
        alpha=message.alpha,
        targets=tuple(message.targets),
        merged=manifest_noun(about, message.merged),
    )


_Heard = TypeVar("_Heard", bound=pb.ReplicaMessage | pb.PlaneMessage)
_Told = TypeVar("_Told", bound=pb.ReplicaMessage | pb.PlaneMessage)


class Line(Generic[_Heard, _Told]):
    """One end of the stream between plane and replica: ordered, with signs of life.

    `read` returns None when the other side has hung up; `write` raises UnavailableError when it has.
    """

    def __init__(
        self,
        read: Callable[[], Awaitable[_Heard | None]],
        write: Callable[[_Told], Awaitable[None]],
        silence_s: float,
    ) -> None:
        self._read = read
        self._write = write
        self.silence_s = silence_s
        self._writing = asyncio.Lock()
        self._inbox: asyncio.Queue[_Heard] = asyncio.Queue()

    async def tell(self, message: _Told) -> None:
        """Send one message. Raises UnavailableError, WaitTimeoutError."""
        async with self._writing:
            await within(self._send(message), self.silence_s, "sending to the other side")

    async def hear(self) -> _Heard:
        """The next message that `pump` has read; bounded by the caller's deadline, or by `pump`'s."""
        return await self._inbox.get()

    async def receive(self) -> _Heard:
        """Read one message past the inbox: for greetings, before `pump` runs.

        Raises:
            UnavailableError: the other side hung up.
            WaitTimeoutError: it is silent for longer than agreed.
        """
        message = await within(self._next(), self.silence_s, "a sign of life of the other side")
        if message is None:
            raise UnavailableError("the other side hung up")
        return message

    async def pump(self, generation: int, overhear: Callable[[_Heard], None]) -> None:
        """Read until the other side hangs up or falls silent; what belongs to another generation is dropped.

        `overhear` sees each message as it comes, and may raise to end it all.
        """
        while True:
            message = await self.receive()
            if message.WhichOneof("body") != "beat" and message.stamp.generation == generation:
                overhear(message)
                self._inbox.put_nowait(message)

    async def beat(self, message: _Told, every_s: float) -> None:
        """Give a sign of life for ever."""
        while True:
            await asyncio.sleep(every_s)
            await self.tell(message)

    async def _next(self) -> _Heard | None:
        return await self._read()

    async def _send(self, message: _Told) -> None:
        await self._write(message)
