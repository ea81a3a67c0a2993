"""Weights that drift as training makes them: from version to version a share of the bf16 words moves by one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from meshrl.common import shared_buffers
from meshrl.contract.types import TensorSpec, Uint8, Version, WeightManifest
from meshrl.weights.messages import digest

RUN = "bench"
TENSOR_BYTES = 8 << 20


class Drifting:
    """Makes one WeightSource after the other; each owns its memory, as a trainer's snapshot does."""

    def __init__(self, total_bytes: int, bucket_bytes: int, changed: float = 0.01) -> None:
        self._random = np.random.default_rng(7)
        words = self._random.normal(0.0, 0.02, total_bytes // 4).astype(np.float32)
        # The upper half of a float32 is a bfloat16; twice the same draw saves the time to make it.
        halves = (words.view(np.uint32) >> 16).astype(np.uint16)
        self._words = np.concatenate([halves, halves[::-1]])
        self._bucket_bytes = bucket_bytes
        self._changed = changed

    def version(self, version: Version, on_bucket: Callable[[int], None] | None = None) -> Source:
        """The next weights; `on_bucket` is called for every bucket that is read."""
        count = int(self._words.size * self._changed)
        places = self._random.integers(0, self._words.size, count)
        self._words[places] += 1
        (memory,) = shared_buffers.allocate([self._words.nbytes])  # as a trainer's snapshot
        memory[:] = self._words.view(np.uint8)
        buckets = [
            memory[at : at + self._bucket_bytes]
            for at in range(0, memory.nbytes, self._bucket_bytes)
        ]
        return Source(version, buckets, on_bucket)


class Source:
    """A WeightSource."""

    def __init__(
        self, version: Version, buckets: list[Uint8], on_bucket: Callable[[int], None] | None
    ) -> None:
        tensors = tuple(
            TensorSpec(
                name=f"layers.{index}.{offset // TENSOR_BYTES}.weight",
                dtype="bfloat16",
                shape=(min(TENSOR_BYTES, bucket.nbytes - offset) // 2,),
                bucket=index,
                offset=offset,
                nbytes=min(TENSOR_BYTES, bucket.nbytes - offset),
            )
            for index, bucket in enumerate(buckets)
            for offset in range(0, bucket.nbytes, TENSOR_BYTES)
        )
        self._buckets = buckets
        self._known: tuple[str, ...] = ()
        self._coming: list[asyncio.Event] = []
        self._on_bucket = on_bucket
        self.manifest = WeightManifest(
            run=RUN,
            version=version,
            tensors=tensors,
            bucket_bytes=tuple(bucket.nbytes for bucket in buckets),
            bucket_hashes=tuple(digest(bucket) for bucket in buckets),
        )

    async def gather(self, seconds: float) -> None:
        """Let the buckets come one by one, evenly, from now on: published meanwhile, it is a `GatheredSource`."""
        known, self.manifest = self.manifest, replace(self.manifest, bucket_hashes=())
        self._coming = [asyncio.Event() for _ in self._buckets]
        self._known = known.bucket_hashes
        for each in self._coming:
            await asyncio.sleep(seconds / len(self._buckets))
            each.set()
        self.manifest = known

    async def gathered(self, index: int) -> tuple[str, tuple[int, ...]]:
        """Return once a bucket is there, with its hash; one that `gather` was not called for is there whole."""
        if not self._coming:
            return self.manifest.bucket_hashes[index], ()
        await self._coming[index].wait()
        return self._known[index], ()

    def bucket(self, index: int) -> Uint8:
        if self._on_bucket is not None:
            self._on_bucket(index)
        return self._buckets[index]
