"""One version of the weights, frozen and packed into byte buckets: what the weight plane sends.

The copy is made once, so the next optimizer step may run while the buckets are on the wire. LoRA's adapters are
merged: engines hold one model, and need not know.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import xxhash

from meshrl.contract.nouns import TensorSpec, Uint8, Version, WeightManifest
from meshrl.trainer.distributed import World
from meshrl.trainer.model import Policy


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """A `WeightSource`."""

    manifest: WeightManifest
    buckets: tuple[Uint8, ...]

    def bucket(self, index: int) -> Uint8:
        """uint8[bucket_bytes[index]], read-only."""
        return self.buckets[index]


def take_snapshot(
    policy: Policy, world: World, *, run: str, version: Version, dtype: str, bucket_bytes: int
) -> Snapshot | None:
    """Gather the whole model, layer by layer. Every rank calls this; rank 0 gets the snapshot.

    Args:
        policy: Its parameters are read, never kept.
        world: The ranks.
        run: Name of the run, for the manifest.
        version: The version that these weights are.
        dtype: What is sent: float32, bfloat16 or float16.
        bucket_bytes: Upper bound of a bucket; a larger tensor gets a bucket of its own.
    """
    kind = getattr(torch, dtype)
    named = list(policy.named_weights())
    specs = layout(
        [(name, weight.shape) for name, weight in named],
        dtype=dtype,
        itemsize=kind.itemsize,
        bucket_bytes=bucket_bytes,
    )
    sizes = [0] * (1 + max((s.bucket for s in specs), default=-1))
    for spec in specs:
        sizes[spec.bucket] = spec.offset + spec.nbytes
    buckets = [np.empty(size, dtype=np.uint8) for size in sizes] if world.is_main else []
    for spec, (_, weight) in zip(specs, named, strict=True):
        full = weight.whole(kind)
        if world.is_main:
            place = buckets[spec.bucket][spec.offset : spec.offset + spec.nbytes]
            place[:] = full.cpu().contiguous().view(-1).view(torch.uint8).numpy()
    if not world.is_main:
        return None
    for bucket in buckets:
        bucket.flags.writeable = False
    manifest = WeightManifest(
        run=run,
        version=version,
        tensors=tuple(specs),
        bucket_bytes=tuple(sizes),
        bucket_hashes=tuple(xxhash.xxh3_128_hexdigest(bucket.data) for bucket in buckets),
    )
    return Snapshot(manifest, tuple(buckets))


def layout(
    shapes: Sequence[tuple[str, tuple[int, ...]]], *, dtype: str, itemsize: int, bucket_bytes: int
) -> list[TensorSpec]:
    """Places for tensors in the order given; offsets are multiples of the item size, as all sizes are."""
    specs: list[TensorSpec] = []
    bucket, offset = 0, 0
    for name, shape in shapes:
        nbytes = itemsize * int(np.prod(shape, dtype=np.int64))
        if offset and offset + nbytes > bucket_bytes:
            bucket, offset = bucket + 1, 0
        specs.append(
            TensorSpec(
                name=name, dtype=dtype, shape=shape, bucket=bucket, offset=offset, nbytes=nbytes
            )
        )
        offset += nbytes
    return specs
