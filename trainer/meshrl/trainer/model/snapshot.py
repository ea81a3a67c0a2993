"""One version of the weights, frozen and packed into byte buckets: what the weight plane sends.

    the plan (names, shapes, places) ─▶ on_plan: it may be published now
    bucket 0 gathered ▸ hashed ─▶ sent    bucket 1 gathered ▸ hashed ─▶ sent    …

The tensors of a bucket are gathered in one collective for each group of ranks that share them:

    rank 0  [q rows 0-3 | k rows 0-1 | …]  ─┐
    rank 1  [q rows 4-7 | k rows 2-3 | …]  ─┴▶ one all-gather ▸ rows put back tensor by tensor, in the bucket

The copy is made once, so the next optimizer step may run while the buckets are under way, and the gather waits for
nobody who takes them. Of LoRA's adapters A and B are sent, with the hashes of the merged weights: each replica merges
them, and proves it, before its engine sees them.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
import xxhash
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from typing_extensions import override

from meshrl.common import shared_buffers
from meshrl.contract.ports import GatheredSource
from meshrl.contract.types import Adapter, TensorSpec, Uint8, Version, WeightManifest
from meshrl.trainer.model.checkpoint_names import Fused, FusedPart, Published
from meshrl.trainer.model.lora import Weight, scale, targets
from meshrl.trainer.model.policy import Policy
from meshrl.trainer.ranks.world import World


@dataclass(frozen=True, slots=True)
class _Hashes:
    """Hashes of a bucket and of each tensor in it."""

    bucket: str
    tensors: list[int]


class WeightSnapshot(GatheredSource):
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
            coming.set_running_or_notify_cancel()  # a cancelled waiter does not end it for others

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
        """Note that a bucket has been hashed, or could not be."""
        if error := hashes.exception():
            self._coming[index].set_exception(error)
        else:
            self._coming[index].set_result(hashes.result())

    def fail(self, error: BaseException) -> None:
        """End the version: no more buckets come."""
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
    on_plan: Callable[[WeightSnapshot], object] | None = None,
) -> WeightSnapshot | None:
    """Gather the whole model, bucket by bucket: one is gathered while the one before is copied and hashed.

    Every rank calls this; rank 0 gets the snapshot.

    Args:
        policy: Its parameters are read, never kept.
        world: The ranks.
        run: Name of the run, for the manifest.
        version: The version that these weights are.
        dtype: Dtype that engines get: float32, bfloat16 or float16.
        bucket_bytes: Upper bound of a bucket; a larger tensor gets a bucket of its own.
        adapters_only: Send the adapter, in float32, of a policy whose adapter others can merge. The merged weights
            are still made once, bucket by bucket, for their hashes.
        on_plan: Called with the snapshot on rank 0 before anything of it is gathered, in this thread. Not called for
            an adapter, whose proposal has the hashes of the merged weights.
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
    return WeightSnapshot(dataclasses.replace(sent.manifest, adapter=adapter), sent.buckets)


def _packed(
    weights: Sequence[tuple[str, Published]],
    dtype: str,
    *,
    world: World,
    run: str,
    version: Version,
    bucket_bytes: int,
    keep: bool = True,
    on_plan: Callable[[WeightSnapshot], object] | None = None,
) -> WeightSnapshot | None:
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
    snapshot = WeightSnapshot(plan, kept or [np.empty(0, np.uint8) for _ in sizes])
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
                copied = _gather_bucket(members, memory, kind, world)
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


def _gather_bucket(
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


@dataclass(frozen=True, slots=True)
class _Step:
    """One gather of a tensor: over the ranks of a group, of which each has as much along `dim` or less at the end."""

    group: dist.ProcessGroup
    dim: int
    shape: tuple[int, ...]
    """Shape of the group's shares together."""


@dataclass(slots=True)
class _Shares:
    """Parts of a tensor on this rank, and the gathers that complete it."""

    parts: list[torch.Tensor]
    """Contiguous. Flat and concatenated they are the share of this rank."""
    steps: list[_Step]
    wanted: bool
    """Whether this rank needs the whole."""


def gather_into(
    memory: torch.Tensor,
    members: Sequence[tuple[TensorSpec, Published]],
    kind: torch.dtype,
    *,
    keep: bool,
) -> None:
    """Gather tensors, as `kind`, to the places that they have in uint8[bucket]. Every rank calls this.

    FSDP shares rows of what tensor ranks or experts' ranks have shared before: its group is gathered first, then
    theirs.

    Args:
        memory: The bucket, on the host; read on ranks that keep it only.
        members: Tensors of the bucket.
        kind: The dtype that it has there.
        keep: Whether this rank wants the bytes.
    """
    alone: list[tuple[TensorSpec, _Shares]] = []
    fused: dict[Fused, dict[str, _Shares]] = {}
    for spec, weight in members:
        if isinstance(weight, FusedPart):
            if weight.name not in weight.source.left and weight.source not in fused:
                shared = weight.source.shared(kind)
                fused[weight.source] = {n: _shares(each, keep) for n, each in shared.items()}
        else:
            value = weight.shared(kind) if isinstance(weight, Weight) else weight.whole(kind)
            alone.append((spec, _shares(value, keep)))
    _gather([s for _, s in alone] + [s for each in fused.values() for s in each.values()])
    for source, shares in fused.items():
        source.fill({name: torch.cat(each.parts) for name, each in shares.items()} if keep else {})
    for spec, each in alone:
        _put(memory, spec.offset, each.parts if keep else [])
    for spec, weight in members:
        if isinstance(weight, FusedPart):
            weight.source.left.discard(weight.name)
            _put(memory, spec.offset, [weight.source.held.pop(weight.name)] if keep else [])


def _shares(value: torch.Tensor, wanted: bool) -> _Shares:
    """The gathers in the reverse order of how the tensor was sharded."""
    if not isinstance(value, DTensor):
        return _Shares([value.contiguous().view(-1)], [], wanted)
    order = _sharers(value)
    if order is None:
        return _Shares([value.full_tensor().contiguous().view(-1)], [], wanted)
    shape, mesh = [*value.shape], value.device_mesh
    steps: list[_Step] = []
    for mesh_dim, dim in order:
        steps.insert(0, _Step(mesh.get_group(mesh_dim), dim, tuple(shape)))
        each = -(-shape[dim] // mesh.size(mesh_dim))
        shape[dim] = max(0, min(each, shape[dim] - each * mesh.get_local_rank(mesh_dim)))
    return _Shares([value.to_local().contiguous().view(-1)], steps, wanted)


def _sharers(value: DTensor) -> list[tuple[int, int]] | None:
    """Pairs of a mesh dimension and the tensor dimension sharded over it, in order; None: another sharding.

    DTensor shares out by the first dimension of the mesh first, but before a strided one by those behind it, as FSDP
    comes last. Where no two share one dimension any order will do: FSDP, in front, comes last then, too.
    """
    shared: list[tuple[int, int]] = []
    for mesh_dim, placement in enumerate(value.placements):
        if isinstance(placement, Shard | _StridedShard):
            if value.device_mesh.size(mesh_dim) > 1:
                shared.append((mesh_dim, placement.dim))
        elif placement != Replicate():
            return None
    pairs = [(one, other) for one, other in itertools.combinations(shared, 2) if one[1] == other[1]]
    strided = {isinstance(value.placements[one[0]], _StridedShard) for one, _ in pairs}
    if len(strided) > 1:
        return None
    return shared if strided == {False} else shared[::-1]


def _gather(tensors: Sequence[_Shares]) -> None:
    """Wait until no copy of them is elsewhere."""
    while any(each.steps for each in tensors):
        first = [each.steps[0].group for each in tensors if each.steps]
        later = {step.group for each in tensors for step in each.steps[1:]}
        # Those of a group that another tensor still comes to are gathered together with that.
        group = next((each for each in first if each not in later), first[0])
        _gather_among(group, [e for e in tensors if e.steps and e.steps[0].group is group])


def _gather_among(group: dist.ProcessGroup, tensors: Sequence[_Shares]) -> None:
    """Do the first step of each, in one collective."""
    ranks, like = group.size(), tensors[0].parts[0]
    places: list[tuple[int, tuple[int, ...]]] = []
    """Offset of each in a rank's part of the buffer, and the shape of most ranks' share."""
    total = 0
    for each in tensors:
        step = each.steps[0]
        most = [*step.shape]
        most[step.dim] = -(-most[step.dim] // ranks)
        places.append((total, tuple(most)))
        total += math.prod(most)
    own = torch.zeros(total, dtype=like.dtype, device=like.device)
    for each, (at, _) in zip(tensors, places, strict=True):
        for part in each.parts:
            own[at : at + part.numel()].copy_(part.view(-1))
            at += part.numel()
    gathered = own.new_empty(ranks, total)
    # As bytes: not every backend knows every dtype.
    dist.all_gather_into_tensor(
        gathered.view(-1).view(torch.uint8), own.view(torch.uint8), group=group
    )
    for each, (at, shape) in zip(tensors, places, strict=True):
        step = each.steps.pop(0)
        if not (each.steps or each.wanted):
            each.parts = []
            continue
        parts, rest = [], step.shape[step.dim]
        for rank in range(ranks):
            length = min(shape[step.dim], rest)
            rest -= length
            share = [*shape]
            share[step.dim] = length
            parts.append(gathered[rank, at : at + math.prod(share)].view(share))
        each.parts = parts if step.dim == 0 else [torch.cat(parts, step.dim)]


def _put(memory: torch.Tensor, at: int, parts: Sequence[torch.Tensor]) -> None:
    for part in parts:
        content = part.contiguous().view(-1).view(torch.uint8)
        memory[at : at + content.numel()].copy_(content, non_blocking=content.is_cuda)
        at += content.numel()
