"""One version of the weights, frozen and packed into byte buckets: what the weight plane sends.

    the plan (names, shapes, places) ─▶ on_plan: it may be published now
    bucket 0 gathered ▸ hashed ─▶ sent    bucket 1 gathered ▸ hashed ─▶ sent    …

The copy is made once, so the next optimizer step may run while the buckets are under way, and the gather waits for
nobody who takes them. Of LoRA's adapters A and B are sent, with the hashes of the merged weights: each replica merges
them, and proves it, before its engine sees them.
"""

from __future__ import annotations

import asyncio
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
from typing_extensions import override

from meshrl.common import shared_buffers
from meshrl.contract.ports import GatheredSource
from meshrl.contract.types import Adapter, TensorSpec, Uint8, Version, WeightManifest
from meshrl.trainer.model.bucket_gather import gather_into
from meshrl.trainer.model.checkpoint_names import Published
from meshrl.trainer.model.lora import scale, targets
from meshrl.trainer.model.policy import Policy
from meshrl.trainer.ranks.world import World


@dataclass(frozen=True, slots=True)
class _Hashes:
    """Of a bucket, and of each tensor in it."""

    bucket: str
    tensors: list[int]


class Snapshot(GatheredSource):
    """The version of a policy: it may be read while the buckets come."""

    def __init__(self, plan: WeightManifest, buckets: Sequence[Uint8]) -> None:
        """A plan that has hashes says that all buckets are there."""
        self.buckets = tuple(bucket.view() for bucket in buckets)
        for bucket in self.buckets:
            bucket.flags.writeable = False
        self._manifest = plan
        self._coming: list[Future[_Hashes]] = (
            [] if plan.bucket_hashes else [Future() for _ in buckets]
        )
        for coming in self._coming:
            coming.set_running_or_notify_cancel()  # whoever stops waiting for it ends it for nobody else

    @property
    def manifest(self) -> WeightManifest:
        """The plan; with hashes once all buckets are there."""
        came = [each for each in self._coming if each.done() and each.exception() is None]
        if len(came) == len(self._coming) and not self._manifest.bucket_hashes:
            found = [each.result() for each in came]
            self._manifest = dataclasses.replace(
                self._manifest,
                bucket_hashes=tuple(each.bucket for each in found),
                tensor_hashes=tuple(known for each in found for known in each.tensors),
            )
        return self._manifest

    def bucket(self, index: int) -> Uint8:
        """uint8[bucket_bytes[index]], read-only; what it will hold once it has been gathered."""
        return self.buckets[index]

    @override
    async def gathered(self, index: int) -> tuple[str, Sequence[int]]:
        """Raises what the gather did."""
        if self._coming:
            found = await asyncio.wrap_future(self._coming[index])
            return found.bucket, found.tensors
        manifest = self._manifest
        pairs = zip(manifest.tensors, manifest.tensor_hashes, strict=True)
        return manifest.bucket_hashes[index], [known for t, known in pairs if t.bucket == index]

    def came(self, index: int, hashes: Future[_Hashes]) -> None:
        """A bucket has been hashed, or could not be."""
        if error := hashes.exception():
            self._coming[index].set_exception(error)
        else:
            self._coming[index].set_result(hashes.result())

    def fail(self, error: BaseException) -> None:
        """No more buckets come."""
        for coming in self._coming:
            if not coming.done():
                coming.set_exception(error)


def take_snapshot(
    policy: Policy,
    world: World,
    *,
    run: str,
    version: Version,
    dtype: str,
    bucket_bytes: int,
    adapters_only: bool = False,
    on_plan: Callable[[Snapshot], object] | None = None,
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
        on_plan: Called with the snapshot on rank 0 before anything of it is gathered, in this thread. Not of an
            adapter, which is proposed with the hashes of what it is merged into.
    """
    packed = partial(_packed, world=world, run=run, version=version, bucket_bytes=bucket_bytes)
    weights = list(policy.published_weights())
    settings, base = policy.adapter, policy.base
    if not adapters_only or settings is None or base is None:
        return packed(weights, dtype, on_plan=on_plan)
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
    on_plan: Callable[[Snapshot], object] | None = None,
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
    cudart: Any = torch.cuda.cudart  # torch leaves it untyped
    pin = shared_buffers.page_lock(cudart()) if world.device.type == "cuda" else None
    kept = shared_buffers.allocate(sizes, pin) if keep and world.is_main else None
    plan = WeightManifest(
        run=run,
        version=version,
        tensors=tuple(specs),
        bucket_bytes=tuple(sizes),
        bucket_hashes=(),
    )
    snapshot = Snapshot(plan, kept or [np.empty(0, np.uint8) for _ in sizes])
    if on_plan is not None and world.is_main:
        on_plan(snapshot)
    try:
        with ThreadPoolExecutor(1, thread_name_prefix="snapshot") as hasher:
            before: Future[_Hashes] | None = None
            for index, members in enumerate(grouped):
                nbytes = sizes[index] if world.is_main else 0
                # Pinned, the GPU writes into it by itself: this thread gathers the next bucket meanwhile.
                memory = (
                    torch.from_numpy(kept[index])
                    if kept
                    else torch.empty(nbytes, dtype=torch.uint8, pin_memory=pin is not None)
                )
                copied = _gather(members, memory, kind, world)
                if before is not None:
                    before.result()  # so that no third one is begun
                before = hasher.submit(_hashed, [s for s, _ in members], memory, copied)
                before.add_done_callback(partial(snapshot.came, index))
            if before is not None:
                before.result()
    except BaseException as error:
        snapshot.fail(error)
        raise
    return snapshot if world.is_main else None


def _gather(
    members: Sequence[tuple[TensorSpec, Published]],
    memory: torch.Tensor,
    kind: torch.dtype,
    world: World,
) -> torch.cuda.Event | None:
    """The bytes of a bucket into `memory`, on rank 0; what is reached when they are there."""
    gather_into(memory, members, kind, keep=world.is_main)
    if world.device.type != "cuda":
        return None
    copied: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    copied.record()
    return copied


def _hashed(
    specs: Sequence[TensorSpec], memory: torch.Tensor, copied: torch.cuda.Event | None
) -> _Hashes:
    """On a thread of its own, beside the gather of the next bucket; nothing on other ranks than the first."""
    if copied is not None:
        copied.synchronize()
    bucket = memory.numpy()
    if not len(bucket):
        return _Hashes("", [0] * len(specs))
    parts = (bucket[spec.offset : spec.offset + spec.nbytes] for spec in specs)
    return _Hashes(
        bucket=xxhash.xxh3_128_hexdigest(bucket.data),
        tensors=[xxhash.xxh3_64_intdigest(part.data) for part in parts],
    )


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
