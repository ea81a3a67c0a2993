"""The tensors of a bucket, gathered from all ranks in one collective.

    rank 0  [q rows 0-3 | k rows 0-1 | …]  ─┐
    rank 1  [q rows 4-7 | k rows 2-3 | …]  ─┴▶ one all-gather ▸ rows put back tensor by tensor, in the bucket

Only tensors that FSDP alone has shared out, by rows, go that way; others are gathered one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from meshrl.contract.types import TensorSpec
from meshrl.trainer.model.checkpoint_names import Published
from meshrl.trainer.model.lora import Weight


@dataclass(frozen=True, slots=True)
class _Rows:
    """A tensor of which each rank has some rows: as many as any other, or fewer at the end."""

    spec: TensorSpec
    own: torch.Tensor
    """uint8: those of this rank."""
    each: int
    """Bytes of a rank that has no fewer than another."""


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
    pending: dict[tuple[DeviceMesh, int], list[_Rows]] = {}
    for spec, weight in members:
        value = weight.shared(kind) if isinstance(weight, Weight) else None
        by = _sharded_by(value)
        if by is not None:
            assert isinstance(value, DTensor)
            rows = -(-value.shape[0] // by[0].size(by[1]))
            each = rows * (spec.nbytes // value.shape[0])
            own = value.to_local().contiguous().view(-1).view(torch.uint8)
            pending.setdefault(by, []).append(_Rows(spec, own, each))
            continue
        if value is None:
            value = weight.whole(kind)
        elif isinstance(value, DTensor):
            value = value.full_tensor()
        if keep:
            _put(memory, spec.offset, value.contiguous().view(-1).view(torch.uint8))
    for (mesh, dim), tensors in pending.items():
        _gather_rows(memory, tensors, mesh, dim, keep=keep)


def _sharded_by(value: torch.Tensor | None) -> tuple[DeviceMesh, int] | None:
    """The one dimension of its mesh over which a tensor's rows are shared out; None for any other tensor."""
    if not isinstance(value, DTensor) or not value.numel():
        return None
    shared = [dim for dim, placement in enumerate(value.placements) if placement != Replicate()]
    if len(shared) != 1 or type(value.placements[shared[0]]) is not Shard:
        return None
    if value.placements[shared[0]] != Shard(0) or value.device_mesh.size(shared[0]) == 1:
        return None
    return value.device_mesh, shared[0]


def _gather_rows(
    memory: torch.Tensor, tensors: Sequence[_Rows], mesh: DeviceMesh, dim: int, *, keep: bool
) -> None:
    ranks, share = mesh.size(dim), sum(each.each for each in tensors)
    own = torch.zeros(share, dtype=torch.uint8, device=tensors[0].own.device)
    at = 0
    for each in tensors:
        own[at : at + each.own.numel()].copy_(each.own)
        at += each.each
    gathered = own.new_empty(ranks * share)
    dist.all_gather_into_tensor(gathered, own, group=mesh.get_group(dim))
    at = 0
    for each in tensors if keep else ():
        for rank in range(ranks):
            start = rank * each.each
            nbytes = min(each.each, each.spec.nbytes - start)
            if nbytes > 0:
                part = gathered[rank * share + at :][:nbytes]
                _put(memory, each.spec.offset + start, part)
        at += each.each


def _put(memory: torch.Tensor, at: int, part: torch.Tensor) -> None:
    memory[at : at + part.numel()].copy_(part, non_blocking=part.is_cuda)
