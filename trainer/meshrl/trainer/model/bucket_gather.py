"""The tensors of a bucket, gathered from all ranks in one collective for each group of ranks that share them.

    rank 0  [q rows 0-3 | k rows 0-1 | …]  ─┐
    rank 1  [q rows 4-7 | k rows 2-3 | …]  ─┴▶ one all-gather ▸ rows put back tensor by tensor, in the bucket

FSDP shares rows of what tensor ranks or experts' ranks have shared before: its group is gathered first, then theirs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from meshrl.contract.types import TensorSpec
from meshrl.trainer.model.checkpoint_names import Fused, Part, Published
from meshrl.trainer.model.lora import Weight


@dataclass(frozen=True, slots=True)
class _Step:
    """One gather of a tensor: over the ranks of a group, of which each has as much along `dim` or less at the end."""

    group: dist.ProcessGroup
    dim: int
    shape: tuple[int, ...]
    """Of what all of the group have together."""


@dataclass(slots=True)
class _Shares:
    """What this rank has of a tensor, and the gathers after which it has all of it."""

    parts: list[torch.Tensor]
    """Contiguous; one after the other, flat, they are what it has."""
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

    Args:
        memory: The bucket, on the host; read on ranks that keep it only.
        members: What is in it.
        kind: The dtype that it has there.
        keep: Whether this rank wants the bytes.
    """
    alone: list[tuple[TensorSpec, _Shares]] = []
    fused: dict[Fused, dict[str, _Shares]] = {}
    for spec, weight in members:
        if isinstance(weight, Part):
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
        if isinstance(weight, Part):
            weight.source.left.discard(weight.name)
            _put(memory, spec.offset, [weight.source.held.pop(weight.name)] if keep else [])


def _shares(value: torch.Tensor, wanted: bool) -> _Shares:
    """The gathers in the reverse order of how the tensor was shared out."""
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
    """Over which dimension of the mesh which one of the tensor is shared out, the first one first; None: otherwise.

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
    """Until nothing of them is elsewhere."""
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
    """Where each begins in a rank's part of the buffer, and the shape of most ranks' share."""
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
