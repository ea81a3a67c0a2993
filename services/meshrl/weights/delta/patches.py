"""The bases of patches: versions that the trainer keeps, encoded once for all; buckets that a replica holds."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field

from meshrl.contract.ports import WeightSource
from meshrl.contract.types import Uint8, Version, WeightManifest
from meshrl.weights.delta import encode_sparse
from meshrl.weights.messages import digest
from meshrl.weights.waiting import WorkerThread


def word_bytes(manifest: WeightManifest, index: int) -> int:
    """4 for a bucket of float32 alone; 2 for bfloat16, float16 and mixtures, which 2 bytes carry as exactly."""
    kinds = {tensor.dtype for tensor in manifest.tensors if tensor.bucket == index}
    return 4 if kinds == {"float32"} else 2


MAX_DENSITY = 0.15
"""Share of changed words above which a bucket goes whole: a patch would save little, and cost its encoding."""
_BASES = 2
"""Older versions that are kept; a replica with an even older one gets whole buckets, once."""


def patch_between(
    base: WeightSource, manifest: WeightManifest, index: int, bucket: Uint8
) -> bytes | None:
    """The patch from the same bucket of `base` to `bucket`; None when the bucket should be sent whole.

    That is when the layouts differ, when more than `MAX_DENSITY` of its words changed, or when the memory of the base
    is no longer what its manifest says.
    """
    before = base.manifest
    if index >= len(before.bucket_bytes) or before.bucket_bytes[index] != bucket.nbytes:
        return None
    old = base.bucket(index)
    if digest(old) != before.bucket_hashes[index]:
        return None
    width = word_bytes(manifest, index)
    return encode_sparse(old, bucket, word_bytes=width, max_density=MAX_DENSITY)


@dataclass(frozen=True, slots=True)
class _Key:
    base: Version
    version: Version
    index: int


class PatchCache:
    """Versions that replicas may serve, and the patches between them. Belongs to one event loop."""

    def __init__(self) -> None:
        self._sources: dict[Version, WeightSource] = {}
        self._patches: dict[_Key, asyncio.Task[bytes | None]] = {}
        self._thread = WorkerThread("weights-delta")
        self.encoded = 0
        """PatchCache encoded so far: one for all replicas that serve a version."""

    @property
    def versions(self) -> list[Version]:
        """The versions in memory, oldest first."""
        return sorted(self._sources)

    def add(self, source: WeightSource, serving: Iterable[Version]) -> None:
        """Add a version, and keep a few of the older ones, of those that replicas serve."""
        newest = source.manifest.version
        bases = sorted({at for at in serving if at in self._sources and at != newest})
        bases = bases[-_BASES:]
        self._sources = {at: self._sources[at] for at in bases} | {newest: source}
        # A patch to an older version is still of use to a replica that follows.
        for key in [key for key in self._patches if key.version not in self._sources]:
            self._patches.pop(key).cancel()

    async def patch(
        self, base: Version | None, manifest: WeightManifest, index: int, bucket: Uint8
    ) -> bytes | None:
        """The patch to a bucket of `manifest` from `base`; None when it is to be sent whole."""
        source = self._sources.get(base) if base is not None else None
        if base is None or source is None or base == manifest.version:
            return None
        key = _Key(base, manifest.version, index)
        task = self._patches.get(key)
        if task is None:
            self.encoded += 1
            work = self._thread.run(patch_between, source, manifest, index, bucket)
            task = self._patches[key] = asyncio.create_task(work, name=f"patch-{index}")
        # The replica that asked first may leave; the others wait for the same task.
        return await asyncio.shield(task)

    async def close(self) -> None:
        """Forget everything; idempotent."""
        self._thread.close()
        tasks = list(self._patches.values())
        self._patches, self._sources = {}, {}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@dataclass(slots=True)
class _Buckets:
    manifest: WeightManifest
    by_index: dict[int, Uint8] = field(default_factory=dict)


class Held:
    """The buckets of the committed version, and of the one that arrives. Arrays are kept, not copied.

    An engine may hold the same arrays. Should it ever write to them, the next patch gives other bytes than the
    manifest's, which the coordinator notices, and the bucket is sent whole.
    """

    def __init__(self) -> None:
        self._committed: _Buckets | None = None
        self._arriving: _Buckets | None = None

    def base(self, manifest: WeightManifest, index: int) -> tuple[Version, Uint8] | None:
        """The committed version and its bucket, if it is a base for a bucket of `manifest`."""
        held = self._committed
        if held is None or held.manifest.run != manifest.run:
            return None
        bucket = held.by_index.get(index)
        if bucket is None or bucket.nbytes != manifest.bucket_bytes[index]:
            return None
        return held.manifest.version, bucket

    def arrived(self, manifest: WeightManifest, index: int, bucket: Uint8) -> None:
        """Keep a bucket of a version that is not committed yet; its hash has not been checked here."""
        if self._arriving is None or self._arriving.manifest.version != manifest.version:
            self._arriving = _Buckets(manifest)
        self._arriving.by_index[index] = bucket

    def commit(self, version: Version) -> None:
        """Make `version`, which the engine serves, the new base, if all of it arrived here."""
        arriving = self._arriving
        if arriving is None or arriving.manifest.version != version:
            return
        self._arriving = None
        if len(arriving.by_index) == len(arriving.manifest.bucket_bytes):
            self._committed = arriving

    def forget(self) -> None:
        """Use no patches until a whole version is committed: a patched bucket was wrong."""
        self._committed = None
