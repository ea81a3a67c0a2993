"""One version of the weights, frozen and packed into byte buckets: what the weight plane sends.

The copy is made once, so the next optimizer step may run while the buckets are under way. Of LoRA's adapters A and
B are sent, with the hashes of the merged weights: each replica merges them, and proves it, before its engine sees
them.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import numpy as np
import torch
import xxhash

from meshrl.contract import shared_buffers
from meshrl.contract.types import Adapter, TensorSpec, Uint8, Version, WeightManifest
from meshrl.trainer.distributed import World
from meshrl.trainer.model.checkpoint_names import Published
from meshrl.trainer.model.lora import scale, targets
from meshrl.trainer.model.policy import Policy


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """A `WeightSource`."""

    manifest: WeightManifest
    buckets: tuple[Uint8, ...]

    def bucket(self, index: int) -> Uint8:
        """uint8[bucket_bytes[index]], read-only."""
        return self.buckets[index]


def take_snapshot(
    policy: Policy,
    world: World,
    *,
    run: str,
    version: Version,
    dtype: str,
    bucket_bytes: int,
    adapters_only: bool = False,
) -> Snapshot | None:
    """Gather the whole model, bucket by bucket: one is gathered while the one before is copied and hashed.

    Every rank calls this; rank 0 gets the snapshot.

    Args:
        policy: Its parameters are read, never kept.
        world: The ranks.
        run: Name of the run, for the manifest.
        version: The version that these weights are.
        dtype: What engines get: float32, bfloat16 or float16.
        bucket_bytes: Upper bound of a bucket; a larger tensor gets a bucket of its own.
        adapters_only: Of a policy whose adapter others can merge, send that, in float32. The merged weights are
            still made once, bucket by bucket, for their hashes.
    """
    packed = partial(_packed, world=world, run=run, version=version, bucket_bytes=bucket_bytes)
    weights = list(policy.published_weights())
    settings, base = policy.adapter, policy.base
    if not adapters_only or settings is None or base is None:
        return packed(weights, dtype)
    merged = packed(weights, dtype, keep=False)
    sent = packed(list(policy.named_adapters()), "float32")
    if merged is None or sent is None:
        return None
    adapter = Adapter(
        base=base,
        rank=cast(int, settings["lora_rank"]),
        scale=scale(policy.hf),
        targets=targets(policy.hf),
        merged=merged.manifest,
    )
    return Snapshot(dataclasses.replace(sent.manifest, adapter=adapter), sent.buckets)


def _packed(
    weights: Sequence[tuple[str, Published]],
    dtype: str,
    *,
    world: World,
    run: str,
    version: Version,
    bucket_bytes: int,
    keep: bool = True,
) -> Snapshot | None:
    """Cast, gathered and hashed, bucket by bucket; without `keep` only the manifest remains."""
    kind = getattr(torch, dtype)
    specs = layout(
        [(name, weight.shape) for name, weight in weights],
        dtype=dtype,
        itemsize=kind.itemsize,
        bucket_bytes=bucket_bytes,
    )
    placed = zip(specs, (weight for _, weight in weights), strict=True)
    grouped = [list(group) for _, group in itertools.groupby(placed, lambda pair: pair[0].bucket)]
    sizes = [spec.offset + spec.nbytes for *_, (spec, _) in grouped]
    pin = _pin if world.device.type == "cuda" else None
    kept = shared_buffers.allocate(sizes, pin) if keep and world.is_main else []
    hashed: list[_Hashed] = []
    with ThreadPoolExecutor(1, thread_name_prefix="snapshot") as hasher:
        under_way: list[Future[_Hashed]] = []
        for index, members in enumerate(grouped):
            nbytes = sizes[index] if world.is_main else 0
            # Pinned, the GPU writes into it by itself: one copy, and this thread gathers the next tensor meanwhile.
            memory = (
                torch.from_numpy(kept[index])
                if kept
                else torch.empty(nbytes, dtype=torch.uint8, pin_memory=pin is not None)
            )
            copied = _gather(members, memory, kind, world)
            hashed += [before.result() for before in under_way]  # so that no third one is begun
            under_way = [hasher.submit(_hashed, [s for s, _ in members], memory, copied, keep)]
        hashed += [before.result() for before in under_way]
    if not world.is_main:
        return None
    manifest = WeightManifest(
        run=run,
        version=version,
        tensors=tuple(specs),
        bucket_bytes=tuple(each.nbytes for each in hashed),
        bucket_hashes=tuple(each.digest for each in hashed),
        tensor_hashes=tuple(digest for each in hashed for digest in each.tensors),
    )
    return Snapshot(manifest, tuple(each.bucket for each in hashed))


@dataclass(frozen=True, slots=True, eq=False)
class _Hashed:
    """A bucket; empty where it is not kept, or on another rank than the first."""

    bucket: Uint8
    nbytes: int
    digest: str
    tensors: list[int]


def _gather(
    members: Sequence[tuple[TensorSpec, Published]],
    memory: torch.Tensor,
    kind: torch.dtype,
    world: World,
) -> torch.cuda.Event | None:
    """The bytes of a bucket into `memory`, on rank 0; what is reached when they are there."""
    cuda = world.device.type == "cuda"
    for spec, weight in members:
        full = weight.whole(kind)
        if world.is_main:
            flat = full.contiguous().view(-1).view(torch.uint8)
            memory[spec.offset : spec.offset + spec.nbytes].copy_(flat, non_blocking=cuda)
    if not cuda:
        return None
    copied: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    copied.record()
    return copied


def _hashed(
    specs: Sequence[TensorSpec], memory: torch.Tensor, copied: torch.cuda.Event | None, keep: bool
) -> _Hashed:
    """On a thread of its own, beside the gather of the next bucket."""
    if copied is not None:
        copied.synchronize()
    bucket = memory.numpy()
    bucket.flags.writeable = False
    if not len(bucket):
        return _Hashed(bucket, 0, "", [])
    parts = (bucket[spec.offset : spec.offset + spec.nbytes] for spec in specs)
    return _Hashed(
        bucket=bucket if keep else bucket[:0].copy(),
        nbytes=bucket.nbytes,
        digest=xxhash.xxh3_128_hexdigest(bucket.data),
        tensors=[xxhash.xxh3_64_intdigest(part.data) for part in parts],
    )


def _pin(address: int, nbytes: int) -> Callable[[], object]:
    """Page-lock memory for CUDA. Raises RuntimeError."""
    load: Any = torch.cuda.cudart  # torch leaves it untyped
    runtime = load()
    torch.cuda.check_error(runtime.cudaHostRegister(address, nbytes, 0))
    return lambda: runtime.cudaHostUnregister(address)


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
