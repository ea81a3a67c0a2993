"""A version while it arrives beside an engine: its memory, each bucket's hash, and an adapter's merging."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from meshrl.common import shared_buffers
from meshrl.contract.errors import (
    CapacityError,
    ConflictError,
    CorruptError,
    UnavailableError,
    UserError,
)
from meshrl.contract.ports import LendingSink, LentBucket, PinningSink, WeightSink
from meshrl.contract.types import Adapter, TensorSpec, Uint8, Version, WeightManifest
from meshrl.v1 import weights_pb2 as pb
from meshrl.weights.carrier import Channel, DeviceChannel
from meshrl.weights.messages import digest, hashes_of, wrong_tensors
from meshrl.weights.waiting import unless

if TYPE_CHECKING:
    import torch

    from meshrl.trainer.model.lora import BaseModel

logger = logging.getLogger(__name__)
_T = TypeVar("_T")


class Arrival:
    """The received part of a version, kept when another channel brings the rest."""

    def __init__(
        self,
        manifest: WeightManifest,
        sink: WeightSink,
        say: Callable[..., Awaitable[None]],
        replaced: asyncio.Event,
    ) -> None:
        """`say` answers the coordinator; `replaced` is set when it names another channel."""
        count = len(manifest.bucket_bytes)
        self.manifest = manifest
        self.buckets: list[Uint8] = [np.empty(0, np.uint8)] * count
        self.digests: dict[int, str] = {}
        """Chunk digests, for those that arrive on a device."""
        self.lent: list[LentBucket] = []
        """Memory of a device in which they arrive, in place of `buckets`; none: on the host."""
        self._missing = set(range(count))
        self._hashes = dict(hashes_of(manifest))
        """Hashes of each bucket and of its tensors, as far as the trainer has said them."""
        self._sink = sink
        self._say = say
        self._replaced = replaced
        self._channel: Channel | None = None
        self._group = 0

    @property
    def version(self) -> Version:
        """The version."""
        return self.manifest.version

    @property
    def hashed(self) -> WeightManifest:
        """The manifest, with the hashes of a version that has come whole."""
        hashes = tuple(self._hashes[index][0] for index in range(len(self.buckets)))
        return replace(self.manifest, bucket_hashes=hashes)

    def is_of(self, manifest: WeightManifest) -> bool:
        """Whether it is of this version, which may have been proposed before it had hashes; keeps those."""
        ours = self.manifest
        other = (
            manifest
            if ours.bucket_hashes
            else replace(manifest, bucket_hashes=(), tensor_hashes=())
        )
        if same := ours == other:
            self._hashes.update(hashes_of(manifest))
        return same

    async def begin(self, channel: Channel, group: int) -> None:
        """Make room for what is missing, and say READY: it comes by this channel."""
        self._channel, self._group = channel, group
        lent: list[LentBucket] = []
        # An adapter that is merged here has to be on the host.
        device = channel.device if isinstance(channel, DeviceChannel) else None
        lends = isinstance(self._sink, LendingSink) and self.manifest.adapter is None
        if device is not None and lends:
            assert isinstance(self._sink, LendingSink)
            await device.settle()
            lent = [*await self._sink.lend(self.manifest, device)]
        if lent != self.lent:  # what has come lies elsewhere
            self._missing.update(range(len(self.buckets)))
            self.lent = lent
        if not lent:
            self._allocate()
        held = sorted(set(range(len(self.buckets))) - self._missing)
        await self._say(ready=pb.ReplicaReady(group=group, held=held, chunk_digests=bool(lent)))

    async def refuse(self, group: int, error: UnavailableError) -> None:
        """Say that this end of a group's channel did not open: another one is proposed then."""
        await self._say(ready=pb.ReplicaReady(group=group, error=str(error)))

    async def take(self, transfer: pb.PlaneTransfer) -> bool:
        """Receive what is sent now; True when nothing is missing any more."""
        if self._channel is None:
            raise ConflictError(f"buckets of version {self.version}, which has no channel")
        indices = transfer.buckets
        for index, expected in zip(indices, transfer.hashes, strict=False):  # one at a time
            self._hashes[index] = expected, transfer.tensor_hashes
        self.digests.update(zip(indices, transfer.chunk_digests, strict=False))
        for index in indices:
            received = pb.ReplicaReceived(bucket=index, group=self._group)
            try:
                if self.lent and index in self._missing:
                    await self._receive_lent(received, index, self._channel)
                else:
                    await self._receive(received, index, self._channel)
            except UnavailableError as error:
                if not self._group:
                    raise
                received.error = str(error)
            await self._say(received=received)
        # A group is sent what others lack, too; an empty announcement says that this was all.
        return not self._missing and not (self._group and indices)

    def _allocate(self) -> None:
        """Host memory, new for each version: an engine may keep these arrays until, and after, the commit.

        New for each channel, too: the one before may still write into unfinished buckets.
        """
        indices = sorted(self._missing)
        sizes = [self.manifest.bucket_bytes[index] for index in indices]
        pin = self._sink.pin if isinstance(self._sink, PinningSink) else None
        try:
            memory = shared_buffers.allocate(sizes, pin)
        except OSError as error:
            raise CapacityError(f"no memory for weights {self.version}: {error}") from error
        for index, bucket in zip(indices, memory, strict=True):
            self.buckets[index] = bucket

    async def _receive(self, received: pb.ReplicaReceived, index: int, channel: Channel) -> None:
        manifest, buckets = self.manifest, self.buckets
        if index not in self._missing:  # in a group: another one lacks it
            buckets = [*buckets]
            (buckets[index],) = shared_buffers.allocate([manifest.bucket_bytes[index]])
        try:
            mapped = await self.unless_replaced(channel.receive(manifest, index, buckets[index]))
        except CorruptError:
            return  # no bucket has no hash: the coordinator sends it again
        if mapped is not None:
            buckets[index] = mapped
        received.moved_bytes = getattr(channel, "moved_bytes", buckets[index].nbytes)
        received.hash = await asyncio.to_thread(digest, buckets[index])
        expected, of_tensors = self._hashes.get(index, ("", ()))
        if received.hash == expected:
            self._missing.discard(index)
        else:
            wrong = await asyncio.to_thread(
                wrong_tensors, manifest, index, buckets[index], of_tensors
            )
            logger.warning("weights %s arrived damaged: %s", manifest.version, wrong)

    async def _receive_lent(
        self, received: pb.ReplicaReceived, index: int, channel: Channel
    ) -> None:
        assert isinstance(channel, DeviceChannel)
        bucket = self.lent[index]
        received.hash = await self.unless_replaced(channel.receive_lent(bucket))
        received.moved_bytes = bucket.nbytes
        if received.hash == self.digests.get(index):
            self._missing.discard(index)
        else:
            logger.warning(
                "weights %s arrived damaged: bucket %d, on the device", self.version, index
            )

    async def unless_replaced(self, work: Awaitable[_T]) -> _T:
        """Await work of a channel, until the coordinator names another one. Raises UnavailableError then."""
        return await unless(self._replaced, work, "another channel is named")


class Merger:
    """Opens the base model when the first adapter arrives: a run without LoRA never reads it."""

    def __init__(self, model_path: Path | None) -> None:
        self._path = model_path
        self._base: BaseModel | None = None

    def merge(self, manifest: WeightManifest, buckets: Sequence[Uint8]) -> list[Uint8]:
        """The buckets of `manifest.served`, bit for bit the trainer's. Blocks for as long as the model is large.

        Raises:
            UserError: this process has no base model, or another one.
            CorruptError: the merged weights have other hashes than the trainer's.
        """
        adapter = manifest.adapter
        assert adapter is not None
        base = self.base_of(adapter)
        parts = {
            # A copy, for torch would warn of read-only memory; adapters are small.
            spec.name: _tensor(
                spec, buckets[spec.bucket][spec.offset : spec.offset + spec.nbytes].copy()
            )
            for spec in manifest.tensors
        }
        served = adapter.merged
        merged_buckets = [np.empty(nbytes, dtype=np.uint8) for nbytes in served.bucket_bytes]
        for spec in served.tensors:
            target = merged_buckets[spec.bucket][spec.offset : spec.offset + spec.nbytes]
            _tensor(spec, target).copy_(_weight(base, spec, adapter, parts))
        for index, bucket in enumerate(merged_buckets):
            if digest(bucket) != served.bucket_hashes[index]:
                self._base = None  # its file may have changed since it was opened: open it again
                raise CorruptError(
                    f"weights {manifest.version}, merged here, are not what the trainer merged:"
                    f" {wrong_tensors(served, index, bucket, hashes_of(served)[index][1])}"
                )
        return merged_buckets

    def base_of(self, adapter: Adapter) -> BaseModel:
        """This process's copy of the base model. Raises UserError: it has none, or another one."""
        from meshrl.trainer.model.lora import (
            BaseModel,  # torch, which not every fleet needs here
        )

        if self._path is None:
            raise UserError("a LoRA adapter arrived, and this process has no model.path")
        if self._base is None:
            base = BaseModel(self._path)
            if base.fingerprint != adapter.base:
                raise UserError(
                    f"model.path {self._path} has the fingerprint {base.fingerprint}, the trainer's adapter belongs"
                    f" to {adapter.base}: put the same checkpoint there"
                )
            self._base = base
        return self._base


def _weight(
    base: BaseModel, spec: TensorSpec, adapter: Adapter, parts: dict[str, torch.Tensor]
) -> torch.Tensor:
    """float32, as the trainer has it before the cast."""
    from meshrl.trainer.model.lora import merged

    weight = base.tensor(spec.name).float()
    module, _, kind = spec.name.rpartition(".")
    if kind != "weight" or module not in adapter.targets:
        return weight
    a, b = (parts[f"{module}.lora_{side}.weight"] for side in "AB")
    return merged(weight, a, b, adapter.rank, adapter.scale)


def _tensor(spec: TensorSpec, data: Uint8) -> torch.Tensor:
    """A view of the bytes."""
    import torch

    return torch.from_numpy(data).view(getattr(torch, spec.dtype)).view(spec.shape)
