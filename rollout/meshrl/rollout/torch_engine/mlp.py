"""The second half of a layer: a gated MLP, or a mixture of them.

Shapes: t tokens, C hidden, F ffn of the MLP or of one expert, E experts, k experts of a token.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
import torch.nn.functional as F


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

    def to(self, device: torch.device) -> SparseMlp:
        """The same on `device`."""
        return dataclasses.replace(
            self,
            router=self.router.to(device),
            gate_up=self.gate_up.to(device),
            down=self.down.to(device),
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
        return hidden
