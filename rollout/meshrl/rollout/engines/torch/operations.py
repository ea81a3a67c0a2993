"""Attention, norms and MLPs of a layer, written out where that is faster than torch's own on a CPU.

Shapes of the MLPs: t tokens, C hidden, F ffn of the MLP or of one expert, E experts, k experts of a token.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F


class RmsNorm:
    """`x / sqrt(mean(x²) + eps) * weight`, the mean over the last axis (Zhang and Sennrich 2019, equation 4).

    On a CPU torch's own is eight small operations. These are four: with s = sqrt(size), the result is
    `x / hypot(|x|, s sqrt(eps)) * (s weight)`.
    """

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        """`weight` is [size], or has more axes in front, to be broadcast over those of `x`."""
        self._weight = weight
        self._eps = eps
        size = weight.shape[-1]
        self._scaled = weight * math.sqrt(size)
        self._floor = torch.full((1,), math.sqrt(size * eps), dtype=weight.dtype)

    def to(self, device: torch.device) -> RmsNorm:
        """The same on `device`."""
        return RmsNorm(self._weight.to(device), self._eps)

    def copy_(self, other: RmsNorm) -> None:
        """Take the weight of another one of this shape."""
        self._weight.copy_(other._weight)
        self._scaled.copy_(other._scaled)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[..., size] to [..., size]."""
        if _plain(x):
            norm: torch.Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
            return (x / norm.hypot_(self._floor)).mul_(self._scaled)
        if self._weight.dim() == 1:
            return F.rms_norm(x, self._weight.shape, self._weight, self._eps)
        return F.rms_norm(x, x.shape[-1:], None, self._eps) * self._weight


def attend(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """Softmax attention of a few queries a row.

    The query heads that share a key head stand as a sequence of queries: no key is repeated. On a CPU torch's own
    (flash attention) takes up to twice as long for so few of them.

    Args:
        queries: [n, K G, D]
        keys: [n, K, L, D]
        values: [n, K, L, D]
        mask: [n K, 1, L], added to the scaled scores.

    Returns:
        [n, K G D]
    """
    count, heads, length, size = keys.shape
    queries = queries.reshape(count * heads, -1, size)
    if _plain(queries):
        scores = torch.baddbmm(
            mask, queries, keys.reshape(-1, length, size).mT, alpha=1 / math.sqrt(size)
        )
        attended = torch.bmm(scores.softmax(-1), values.reshape(-1, length, size))
    else:
        attended = F.scaled_dot_product_attention(
            queries.view(count, heads, -1, size),
            keys,
            values,
            attn_mask=mask.view(count, heads, 1, length),
        )
    return attended.reshape(count, -1)


def row_ends(
    lengths: torch.Tensor, heads: int, key_heads: int, length: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """For `attend_up_to`, where rows with `lengths` [n] end in a cache of `length` positions.

    Returns:
        int32[n K + 1]: 0, G, 2G …; int32[n K + 1]: 0, L, 2L …; int32[n K]: how many of the L count.
    """
    borders = torch.arange(len(lengths) * key_heads + 1, dtype=torch.int32, device=lengths.device)
    # A copy also of a single row, which `reshape` would only view: the kernel wants numbers that lie side by side.
    ends = lengths.to(torch.int32)[:, None].repeat(1, key_heads).flatten()
    return borders * (heads // key_heads), borders * length, ends


def attend_up_to(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    ends: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> torch.Tensor:
    """`attend` on a GPU, to the end of each row only: there a key head of a row is a sequence of its own.

    The kernel is one of torch's `scaled_dot_product_attention`, called as xformers calls it for padded keys
    (https://github.com/facebookresearch/xformers/blob/main/xformers/ops/fmha/cutlass.py).
    """
    count, heads, length, size = keys.shape
    flat = [values.reshape(1, -1, 1, size) for values in (queries, keys, values)]
    borders, key_borders, lengths = ends
    attended: torch.Tensor = torch.ops.aten._efficient_attention_forward(
        *flat, None, borders, key_borders, queries.shape[1] // heads, length, 0, 0, seqlen_k=lengths
    )[0]
    return attended.reshape(count, -1)


def _plain(values: torch.Tensor) -> bool:
    return values.is_cpu and values.dtype is torch.float32


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseMlp:
    """`silu(x gate) * (x up)`, projected back."""

    gate_up: torch.Tensor
    """[2F, C]"""
    gate_up_bias: torch.Tensor | None
    down: torch.Tensor
    """[F, C]: transposed, for addmm."""
    down_bias: torch.Tensor | None

    def to(self, device: torch.device) -> DenseMlp:
        """The same on `device`."""
        biases = (self.gate_up_bias, self.down_bias)
        gate_up_bias, down_bias = (None if bias is None else bias.to(device) for bias in biases)
        return DenseMlp(
            gate_up=self.gate_up.to(device),
            gate_up_bias=gate_up_bias,
            down=self.down.to(device),
            down_bias=down_bias,
        )

    def add_to(
        self, hidden: torch.Tensor, normed: torch.Tensor, taken: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Add what becomes of `normed` [t, C] to `hidden` [t, C], and return it. There are no experts to tell of."""
        gate, up = F.linear(normed, self.gate_up, self.gate_up_bias).chunk(2, -1)
        hidden.addmm_(F.silu(gate).mul_(up), self.down)
        if self.down_bias is not None:
            hidden += self.down_bias
        return hidden


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseMlp:
    """Experts, of which a router gives each token the k with the greatest score (Mixtral, Qwen3-MoE)."""

    router: torch.Tensor
    """[E, C]"""
    gate_up: torch.Tensor
    """[E, 2F, C]"""
    down: torch.Tensor
    """[E, F, C]: each transposed."""
    chosen: int
    """k"""
    normalised: bool
    """The k shares of a token are made to sum to 1."""
    shared: DenseMlp | None = None
    """An expert that every token goes to, as far as the sigmoid of its gate says."""
    shared_gate: torch.Tensor | None = None
    """[1, C]"""

    def to(self, device: torch.device) -> SparseMlp:
        """The same on `device`."""
        return dataclasses.replace(
            self,
            router=self.router.to(device),
            gate_up=self.gate_up.to(device),
            down=self.down.to(device),
            shared=None if self.shared is None else self.shared.to(device),
            shared_gate=None if self.shared_gate is None else self.shared_gate.to(device),
        )

    def add_to(
        self, hidden: torch.Tensor, normed: torch.Tensor, taken: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Add what the experts make of `normed` [t, C] to `hidden` [t, C]; `taken` [t, k] gets which they are."""
        shares, experts = F.linear(normed, self.router).softmax(-1, torch.float32).topk(self.chosen)
        if taken is not None:
            taken.copy_(experts)
        if self.normalised:
            shares = shares / shares.sum(-1, keepdim=True)
        # The t k pairs of token and expert, in order of their experts: one multiplication an expert.
        ordered, order = experts.flatten().sort(stable=True)
        tokens = normed[order // self.chosen]
        made = torch.empty_like(tokens)
        ends = torch.bincount(ordered, minlength=len(self.router)).cumsum(0).tolist()
        for expert, (begin, end) in enumerate(zip([0, *ends], ends, strict=False)):
            if begin < end:
                gate, up = F.linear(tokens[begin:end], self.gate_up[expert]).chunk(2, -1)
                torch.mm(F.silu(gate).mul_(up), self.down[expert], out=made[begin:end])
        # Back to the tokens' order, and there summed: no sum depends on which other tokens there are.
        made = made[order.argsort()].view(*experts.shape, -1)
        hidden += (made * shares.to(made.dtype)[..., None]).sum(1)
        if self.shared is not None and self.shared_gate is not None:
            always = self.shared.add_to(torch.zeros_like(hidden), normed)
            hidden += always * F.linear(normed, self.shared_gate).sigmoid()
        return hidden
