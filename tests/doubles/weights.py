"""Random weights, and an engine that keeps only their hashes: a weight plane without a model.

Tests, benchmarks and a dry run of a fleet use them in place of a trainer and of engines.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
from typing_extensions import override

from meshrl.common import chunk_digest, shared_buffers
from meshrl.contract.errors import CorruptError, NotFoundError, UserError
from meshrl.contract.ports import DeviceReceiver, GatheredSource, LentBucket
from meshrl.contract.types import OnUpdate, TensorSpec, Uint8, Version, WeightManifest
from meshrl.weights.messages import digest, hashes_of, tensor_digest
from tests.doubles.device import StubDevice

_ITEM = {"float32": 4, "bfloat16": 2}


class StubSource:
    """A WeightSource of random bytes that depend on the version only."""

    def __init__(
        self,
        run: str,
        version: Version,
        *,
        buckets: int = 4,
        bucket_bytes: int = 1 << 16,
        dtype: Literal["float32", "bfloat16"] = "float32",
        density: float = 1.0,
    ) -> None:
        """Lay out `buckets` buckets of two tensors each.

        Args:
            run: the training run.
            version: decides the bytes.
            buckets: how many.
            bucket_bytes: of each; a multiple of 16.
            dtype: of every tensor.
            density: below 1, words move by one unit in the last place, this share of them from one step to the next,
                whatever the epoch.
        """
        sparse = density < 1.0
        random = np.random.default_rng(0 if sparse else [version.epoch, version.step])
        self._buckets = shared_buffers.allocate([bucket_bytes] * buckets)
        for bucket in self._buckets:
            bucket[:] = random.integers(0, 256, bucket_bytes, dtype=np.uint8)
        for bucket in self._buckets:
            if sparse:  # each word changes once in `period` steps
                period, words = round(1 / density), bucket.view(f"u{_ITEM[dtype]}")
                turns = (version.step + random.integers(0, period, len(words))) // period
                words += turns.astype(words.dtype)
            bucket.flags.writeable = False
        half = bucket_bytes // 2
        tensors = tuple(
            TensorSpec(
                name=f"layers.{index}.{part}.weight",
                dtype=dtype,
                shape=(8, half // (8 * _ITEM[dtype])),
                bucket=index,
                offset=offset,
                nbytes=half,
            )
            for index in range(buckets)
            for part, offset in (("up", 0), ("down", half))
        )
        self._manifest = WeightManifest(
            run=run,
            version=version,
            tensors=tensors,
            bucket_bytes=(bucket_bytes,) * buckets,
            bucket_hashes=tuple(digest(bucket) for bucket in self._buckets),
            tensor_hashes=tuple(tensor_digest(self._buckets[t.bucket], t) for t in tensors),
        )

    @property
    def manifest(self) -> WeightManifest:
        """The manifest of the bytes."""
        return self._manifest

    def bucket(self, index: int) -> Uint8:
        """uint8[bucket_bytes[index]]."""
        return self._buckets[index]


class GatheredStub(StubSource, GatheredSource):
    """One that is published before its buckets are there, as a trainer's versions are. Made in an event loop."""

    def __init__(self, run: str, version: Version, **options: Any) -> None:
        """`options` as `StubSource` has them; no bucket has come."""
        super().__init__(run, version, **options)
        self._coming = [asyncio.Event() for _ in self._manifest.bucket_bytes]
        self._error: Exception | None = None

    @property
    def manifest(self) -> WeightManifest:
        """The manifest, without hashes until all buckets have come."""
        if all(each.is_set() for each in self._coming) and self._error is None:
            return self._manifest
        return replace(self._manifest, bucket_hashes=(), tensor_hashes=())

    def come(self, index: int) -> None:
        """A bucket is there."""
        self._coming[index].set()

    def fail(self, error: Exception) -> None:
        """Nothing comes any more."""
        self._error = error
        for each in self._coming:
            each.set()

    @override
    async def gathered(self, index: int) -> tuple[str, Sequence[int]]:
        await self._coming[index].wait()
        if self._error is not None:
            raise self._error
        return hashes_of(self._manifest)[index]


class HashSink:
    """A WeightSink that serves hashes."""

    def __init__(self) -> None:
        self.version: Version | None = None
        self.hashes: tuple[str, ...] = ()
        """Hashes of the bytes that it serves."""
        self.commits: list[Version] = []
        self._staged: dict[Version, tuple[str, ...]] = {}

    async def stage_weights(self, manifest: WeightManifest, buckets: Sequence[Uint8]) -> None:
        """Hash the buckets. Raises UserError when their sizes differ from the manifest."""
        if tuple(bucket.nbytes for bucket in buckets) != manifest.bucket_bytes:
            raise UserError(
                f"weights {manifest.version}: buckets are not of their manifest's sizes"
            )
        self._staged[manifest.version] = tuple(digest(bucket) for bucket in buckets)

    async def commit_weights(self, version: Version, on_update: OnUpdate) -> None:
        """Serve what was staged. Raises NotFoundError."""
        if version not in self._staged:
            raise NotFoundError(f"weights {version} are not staged")
        self.hashes = self._staged.pop(version)
        self.version = version
        self.commits.append(version)

    async def discard_weights(self, version: Version) -> None:
        """Forget it."""
        self._staged.pop(version, None)


class LendingHashSink(HashSink):
    """One on the stub of a device, whose memory it lends: versions arrive there."""

    def __init__(self) -> None:
        super().__init__()
        self.device = StubDevice()
        self.lent: dict[LentBucket, int] = {}
        """Pointers."""
        self.versions: list[Version] = []
        """Versions that arrived."""

    async def lend(
        self, manifest: WeightManifest, receiver: DeviceReceiver
    ) -> Sequence[LentBucket]:
        """Lend memory for every version."""
        if [bucket.nbytes for bucket in self.lent] != [*manifest.bucket_bytes]:
            self.free()
            for nbytes in manifest.bucket_bytes:
                pointer = self.device.allocate(nbytes)
                self.lent[LentBucket(self.device.export(pointer).hex(), nbytes)] = pointer
        await receiver.reach(next(iter(self.lent)))
        return [*self.lent]

    async def stage_lent(self, manifest: WeightManifest, digests: Sequence[str]) -> None:
        """Hash what lies there. Raises CorruptError where that has other digests."""
        buckets = [np.empty(bucket.nbytes, np.uint8) for bucket in self.lent]
        for pointer, bucket in zip(self.lent.values(), buckets, strict=True):
            self.device.read(pointer, bucket)
        if [*map(chunk_digest.digest, buckets)] != [*digests]:
            raise CorruptError(f"weights {manifest.version}: other bytes lie on the device")
        self.versions.append(manifest.version)
        await self.stage_weights(manifest, buckets)

    def free(self) -> None:
        """All that is lent."""
        while self.lent:
            self.device.free(self.lent.popitem()[1])
