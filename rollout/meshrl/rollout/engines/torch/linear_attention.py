"""Gated delta rule (Yang et al. 2024, https://arxiv.org/abs/2412.06464), as layers of Qwen3-Next and Qwen3.5 have it.

    x ─▶ q, k, v ─▶ causal convolution, silu ─▶ S = exp(g) S;  S += k (β (v - kᵀS))ᵀ;  o = qᵀS ─▶ norm · silu(z)

Such a layer keeps no keys of a row but a state of fixed size: S, and the last inputs of the convolution.

Shapes: n rows, P padded prompt length, C hidden, H value heads, J key heads, D and E the widths of a key and of a
value head, I = 2JD + HE inputs of the convolution, which is W wide.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from meshrl.rollout.engines.torch.operations import RmsNorm

CHUNK = 64
"""Tokens that are computed at once."""
_EPS = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaRuleShape:
    """Which layers have the rule, and how large it is there."""

    layers: frozenset[int]
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    width: int
    """Kernel width of the convolution."""
    interleaved: bool
    """Projections are stored by key head: `in_proj_qkvz` and `in_proj_ba` (Qwen3-Next)."""

    @property
    def splits(self) -> tuple[int, int, int, int, int, int]:
        """Rows of q, k, v, z, b and a in the projection."""
        keys, values = self.key_heads * self.key_dim, self.value_heads * self.value_dim
        return keys, keys, values, values, self.value_heads, self.value_heads

    @property
    def convolved(self) -> int:
        """I: inputs of the convolution."""
        return sum(self.splits[:3])

    def shapes(self, hidden: int) -> dict[str, tuple[int, ...]]:
        """Parameter name to shape, in a layer."""
        named: dict[str, tuple[int, ...]] = {
            "conv1d.weight": (self.convolved, 1, self.width),
            "dt_bias": (self.value_heads,),
            "A_log": (self.value_heads,),
            "norm.weight": (self.value_dim,),
            "out_proj.weight": (hidden, self.splits[3]),
        }
        sizes = {
            "qkv": self.convolved,
            "z": self.splits[3],
            "b": self.value_heads,
            "a": self.value_heads,
        }
        if self.interleaved:
            sizes = {"qkvz": self.convolved + self.splits[3], "ba": 2 * self.value_heads}
        named |= {f"in_proj_{name}.weight": (size, hidden) for name, size in sizes.items()}
        return {f"linear_attn.{name}": shape for name, shape in named.items()}

    def joined(self, own: Any, prefix: str) -> torch.Tensor:
        """[sum(splits), C]: q, k, v, z, b, a, whatever order they are stored in."""
        if not self.interleaved:
            return torch.cat(
                [own(f"{prefix}in_proj_{name}.weight") for name in ("qkv", "z", "b", "a")]
            )
        found: list[torch.Tensor] = []
        sizes = [size // self.key_heads for size in self.splits]
        for name, parts in (("qkvz", sizes[:4]), ("ba", sizes[4:])):
            stored = own(f"{prefix}in_proj_{name}.weight")
            by_head = stored.view(self.key_heads, -1, stored.shape[-1])
            found += [part.flatten(0, 1) for part in by_head.split(parts, 1)]
        return torch.cat(found)


class RowStates:
    """The states of the running rows, which always are rows `0 … n - 1`, of each layer."""

    def __init__(self, shape: DeltaRuleShape, dtype: torch.dtype, device: torch.device) -> None:
        self.bytes_per_row = len(shape.layers) * (
            shape.convolved * (shape.width - 1) * dtype.itemsize
            + shape.value_heads * shape.key_dim * shape.value_dim * 4
        )
        inputs = torch.zeros(0, shape.convolved, shape.width - 1, dtype=dtype, device=device)
        memory = torch.zeros(0, shape.value_heads, shape.key_dim, shape.value_dim, device=device)
        self.layers = [(inputs, memory)] * len(shape.layers)
        """[rows, I, W - 1] and float32[rows, H, D, E] of each."""

    def resize(self, rows: int, kept: int) -> None:
        """Change the number of rows; the first `kept` keep their states."""
        self.layers = [
            (_resized(one, rows, kept), _resized(two, rows, kept)) for one, two in self.layers
        ]

    def move(self, source: int, target: int) -> None:
        """Copy row `source` over row `target`."""
        for layer in self.layers:
            for part in layer:
                part[target] = part[source]

    def clear(self, row: int) -> None:
        """Zero a row."""
        for layer in self.layers:
            for part in layer:
                part[row].zero_()


def _resized(held: torch.Tensor, rows: int, kept: int) -> torch.Tensor:
    made = held.new_zeros(rows, *held.shape[1:])
    made[:kept] = held[:kept]
    return made


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaRule:
    """The weights of a layer, but for its output projection."""

    shape: DeltaRuleShape
    projection: torch.Tensor
    """[sum(splits), C]"""
    convolution: torch.Tensor
    """[I, W]"""
    decay: torch.Tensor
    """float32[H]: -exp(A_log)"""
    dt_bias: torch.Tensor
    """float32[H]"""
    norm: RmsNorm
    """[E]"""

    def to(self, device: torch.device) -> DeltaRule:
        """The same on `device`."""
        names = ("projection", "convolution", "decay", "dt_bias", "norm")
        return dataclasses.replace(self, **{name: getattr(self, name).to(device) for name in names})

    def prefill(
        self, normed: torch.Tensor, lengths: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Run padded prompts from no state.

        Args:
            normed: [n, P, C], padded on the right.
            lengths: int64[n], true lengths.

        Returns:
            [n, P, H E]; and the state behind each prompt: [n, I, W - 1], float32[n, H, D, E].
        """
        mixed, z, beta, decay = self._projected(normed)
        before = self.shape.width - 1
        inputs = F.pad(mixed.mT, (before, 0))
        ends = lengths[:, None] + torch.arange(before, device=lengths.device)
        last = inputs.gather(2, ends[:, None].expand(-1, inputs.shape[1], -1))
        convolved = F.conv1d(inputs, self.convolution[:, None], groups=inputs.shape[1])
        query, key, value = self._heads(F.silu(convolved).mT)
        # Padding leaves the state as it is.
        real = torch.arange(normed.shape[1], device=lengths.device) < lengths[:, None]
        beta, decay = beta * real[..., None], decay * real[..., None]
        made, memory = delta_rule(query, key, value, decay, beta)
        return self._gated(made, z), last, memory

    def decode(
        self, normed: torch.Tensor, inputs: torch.Tensor, memory: torch.Tensor
    ) -> torch.Tensor:
        """Feed a token to each row: [n, H E] of [n, C]. Moves the states `inputs` and `memory` on."""
        mixed, z, beta, decay = self._projected(normed)
        wide = torch.cat([inputs, mixed[..., None]], -1)
        inputs.copy_(wide[..., 1:])
        query, key, value = self._heads(F.silu((wide * self.convolution).sum(-1)))
        memory.mul_(decay.exp()[..., None, None])
        known = (key[..., None, :] @ memory)[..., 0, :]
        change = (value - known) * beta[..., None]
        memory.addcmul_(key[..., None], change[..., None, :])
        return self._gated((query[..., None, :] @ memory)[..., 0, :], z)

    def _projected(self, normed: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """[..., I], z [..., H E], float32[..., H] of β and of the logarithm of the decay."""
        splits = self.shape.splits
        parts = (self.shape.convolved, *splits[3:])
        mixed, z, b, a = torch.split(F.linear(normed, self.projection), list(parts), -1)
        decay = self.decay * F.softplus(a.float() + self.dt_bias)
        return mixed, z, b.float().sigmoid(), decay

    def _heads(self, convolved: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Float32[..., H, D] twice, scaled, and float32[..., H, E], of [..., I]."""
        shape = self.shape
        query, key, value = torch.split(convolved.float(), list(shape.splits[:3]), -1)
        times = shape.value_heads // shape.key_heads
        query, key = (_unit(x.unflatten(-1, (-1, shape.key_dim))) for x in (query, key))  # type: ignore[no-untyped-call]
        query, key = (x.repeat_interleave(times, -2) for x in (query, key))
        return query * shape.key_dim**-0.5, key, value.unflatten(-1, (-1, shape.value_dim))  # type: ignore[no-untyped-call]

    def _gated(self, made: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        """[..., H E] of float32[..., H, E]."""
        normed = self.norm(made.to(z.dtype)).flatten(-2)
        return (normed.float() * F.silu(z.float())).to(z.dtype)


def _unit(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _EPS)


def delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The rule over whole prompts, chunk by chunk, from S = 0; all float32.

    Within a chunk what tokens add to S solves a triangular system (section 3.3 of the paper): token i sees
    exp(G_i - G_j) of what token j added, G the sum of the decays so far.

    Args:
        query: [n, P, H, D], scaled.
        key: [n, P, H, D], of length 1.
        value: [n, P, H, E].
        decay: [n, P, H], at most 0.
        beta: [n, P, H], 0 to 1.

    Returns:
        [n, P, H, E] and S behind the last token [n, H, D, E].
    """
    rows, length, heads, width = value.shape
    memory = value.new_zeros(rows, heads, key.shape[-1], width)
    made = []
    for begin in range(0, length, CHUNK):
        q, k, v = (x[:, begin : begin + CHUNK].transpose(1, 2) for x in (query, key, value))
        total = decay[:, begin : begin + CHUNK].mT.cumsum(-1)
        weight = beta[:, begin : begin + CHUNK].mT[..., None]
        apart = (total[..., :, None] - total[..., None, :]).tril().exp().tril()
        added = torch.linalg.solve_triangular(
            (weight * k) @ k.mT * apart,
            weight * (v - total.exp()[..., None] * (k @ memory)),
            upper=False,
            unitriangular=True,
        )
        seen = (q @ k.mT * apart) @ added + total.exp()[..., None] * (q @ memory)
        made.append(seen.transpose(1, 2))
        left = (total[..., -1:] - total).exp()[..., None]
        memory = memory * total[..., -1, None, None].exp() + (left * k).mT @ added
    return torch.cat(made, 1), memory
