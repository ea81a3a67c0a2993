"""Sequence parallelism as in DeepSpeed-Ulysses (Jacobs et al. 2023, https://arxiv.org/abs/2309.14509).

Ranks of a sequence group forward the same pack, each a share of its tokens; around attention they swap tokens for
heads:

    [H, P/s] ──all-to-all──▶ [H/s, P] ──attention──▶ [P, H/s] ──all-to-all──▶ [P/s, H]

Log-probs are joined afterwards, so that each rank computes the loss of the whole pack and differentiates its own
share of it. Parameter gradients of a group's ranks add up to the gradient.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class SequenceGroup:
    """The ranks that share packs with this one."""

    group: dist.ProcessGroup
    rank: int
    size: int


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class SequenceShare:
    """This rank's part of one pack: `width` tokens, one after the other; the last shares end in padding."""

    among: SequenceGroup
    tokens: int
    """P: of the whole pack."""
    width: int
    """p = ⌈P/s⌉."""
    counts: tuple[int, ...]
    """Response tokens of each rank's share."""

    def heads(self, x: torch.Tensor) -> torch.Tensor:
        """[1, H, p, D], all heads of this share, to [1, H/s, P, D], this rank's heads of the pack."""
        _, heads, width, size = x.shape
        s = self.among.size
        parts = x.reshape(s, heads // s, width, size)
        swapped = _swap(parts, self.among.group).transpose(0, 1)
        return swapped.reshape(1, heads // s, s * width, size)[:, :, : self.tokens]

    def shares(self, x: torch.Tensor) -> torch.Tensor:
        """[1, P, H/s, D] to [1, p, H, D]: the inverse of `heads`, tokens first."""
        _, tokens, heads, size = x.shape
        s, width = self.among.size, self.width
        padded = F.pad(x, (0, 0, 0, 0, 0, s * width - tokens))
        swapped = _swap(padded.reshape(s, width, heads, size), self.among.group).transpose(0, 1)
        return swapped.reshape(1, width, s * heads, size)

    def joined(self, values: torch.Tensor) -> torch.Tensor:
        """[n, …] of this share's response tokens to [N, …] of the pack's; a rank's gradient is that of its part."""
        if not any(self.counts):
            return values
        joined: torch.Tensor = _Join.apply(values, self)  # type: ignore[no-untyped-call]
        return joined


def repeats(query_heads: int, key_heads: int, size: int) -> int:
    """How often each key head must come for `size` ranks to get equally many, each beside its query heads."""
    least = math.lcm(key_heads, size) // key_heads
    return least if query_heads % (key_heads * least) == 0 else query_heads // key_heads


def _swap(parts: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Part i to rank i, and from it: [s, ...]."""
    swapped: torch.Tensor = _AllToAll.apply(parts, group)  # type: ignore[no-untyped-call]
    return swapped


class _AllToAll(torch.autograd.Function):
    """Its own transpose."""

    @staticmethod
    def forward(ctx: Any, parts: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _all_to_all(parts, group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _all_to_all(grads[0], ctx.group), None


def _all_to_all(parts: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    sent = parts.contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return received


class _Join(torch.autograd.Function):
    """All-gather of unequal parts; the gradient of what came from others is theirs to follow."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, share: SequenceShare) -> torch.Tensor:
        ctx.share = share
        longest = max(share.counts)
        own = F.pad(values, (0, 0) * (values.dim() - 1) + (0, longest - len(values)))
        parts = [torch.empty_like(own) for _ in share.counts]
        dist.all_gather(parts, own, group=share.among.group)
        return torch.cat([p[:n] for p, n in zip(parts, share.counts, strict=True)])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        counts, rank = ctx.share.counts, ctx.share.among.rank
        begin = sum(counts[:rank])
        return grads[0][begin : begin + counts[rank]], None
