"""Multi-head latent attention (DeepSeek-V2, https://arxiv.org/abs/2405.04434, section 2.1.2), up to the heads.

The cache holds whole keys and values. Values and the output projection are padded with zeros to the size of keys, and
attention is that of any other model.

Shapes: C hidden, H heads, D head_dim, of which `plain` are not rotated and R are; rQ and rK ranks.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from meshrl.rollout.torch_engine.operations import RmsNorm


@dataclass(frozen=True, slots=True, kw_only=True)
class Latent:
    """The sizes of latent attention."""

    heads: int
    query_rank: int | None
    """None where queries are made from the hidden vector itself."""
    rank: int
    """Of keys and values together."""
    plain: int
    rotated: int
    value_dim: int
    interleaved: bool
    """The checkpoint has the two numbers that are rotated together side by side."""
    query_scale: float
    """Of the scores, beside the square root of D (yarn)."""

    @property
    def head_dim(self) -> int:
        """Of queries and keys."""
        return self.plain + self.rotated

    def shapes(self, hidden: int) -> dict[str, tuple[int, ...]]:
        """Name in a layer to shape."""
        queries = self.heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {
            "kv_a_proj_with_mqa.weight": (self.rank + self.rotated, hidden),
            "kv_a_layernorm.weight": (self.rank,),
            "kv_b_proj.weight": (self.heads * (self.plain + self.value_dim), self.rank),
            "o_proj.weight": (hidden, self.heads * self.value_dim),
        }
        if self.query_rank is None:
            shapes["q_proj.weight"] = (queries, hidden)
        else:
            shapes["q_a_proj.weight"] = (self.query_rank, hidden)
            shapes["q_a_layernorm.weight"] = (self.query_rank,)
            shapes["q_b_proj.weight"] = (queries, self.query_rank)
        return {f"self_attn.{name}": shape for name, shape in shapes.items()}

    def halves(self, rows: torch.Tensor) -> torch.Tensor:
        """`rows` [..., D or R, n] with those that are rotated in the order of other models: all first ones first."""
        if not self.interleaved:
            return rows
        kept, turned = rows.tensor_split((rows.shape[-2] - self.rotated,), -2)
        return torch.cat((kept, turned[..., 0::2, :], turned[..., 1::2, :]), -2)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentHeads:
    """The projections from the normed hidden vector to queries, keys and values."""

    latent: Latent
    down: torch.Tensor
    """[rQ + rK + R, C], or [H D + rK + R, C] where queries have no rank."""
    query_norm: RmsNorm | None
    """[rQ]"""
    query_up: torch.Tensor | None
    """[H D, rQ]"""
    norm: RmsNorm
    """[rK]"""
    up: torch.Tensor
    """[H (plain + value_dim), rK]"""

    def to(self, device: torch.device) -> LatentHeads:
        """The same on `device`."""
        parts: dict[str, Any] = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        moved = {n: part.to(device) for n, part in parts.items() if hasattr(part, "to")}
        return dataclasses.replace(self, **moved)

    def __call__(self, normed: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """[..., C] to [..., 3H, D]: rotated queries, rotated keys, padded values; cos and sin are [..., 1, R]."""
        latent, before = self.latent, normed.shape[:-1]
        made = F.linear(normed, self.down)
        ends = made.shape[-1] - latent.rotated - latent.rank, made.shape[-1] - latent.rotated
        queries, compressed, turned = made.tensor_split(ends, -1)
        if self.query_norm is not None and self.query_up is not None:
            queries = F.linear(self.query_norm(queries), self.query_up)
        both = F.linear(self.norm(compressed), self.up).view(*before, latent.heads, -1)
        heads = normed.new_zeros(*before, 3 * latent.heads, latent.head_dim)
        asking, keys, values = heads.chunk(3, -2)
        asking.copy_(queries.view(asking.shape))
        keys[..., : latent.plain] = both[..., : latent.plain]
        keys[..., latent.plain :] = turned[..., None, :]
        values[..., : latent.value_dim] = both[..., latent.plain :]
        rotated = heads[..., : 2 * latent.heads, latent.plain :]
        rotated.copy_(rotated * cos + rotated.roll(latent.rotated // 2, -1) * sin)
        return heads


_EPS = 1e-6
"""Epsilon of the norms inside latent attention: transformers gives them no `rms_norm_eps`."""


def build_latent(
    own: Callable[[str], torch.Tensor], latent: Latent
) -> tuple[LatentHeads, torch.Tensor]:
    """The projections from the tensors that `own` gives by their name in `self_attn`, and the output's [H D, C]."""
    direct = latent.query_rank is None
    queries = own("q_proj.weight" if direct else "q_b_proj.weight") * latent.query_scale
    by_head = queries.view(latent.heads, latent.head_dim, -1)
    queries = latent.halves(by_head).reshape(queries.shape)
    first = queries if direct else own("q_a_proj.weight")
    out = own("o_proj.weight")
    by_head = out.view(len(out), latent.heads, latent.value_dim)
    padded = F.pad(by_head, (0, latent.head_dim - latent.value_dim))
    heads = LatentHeads(
        latent=latent,
        down=torch.cat((first, latent.halves(own("kv_a_proj_with_mqa.weight")))),
        query_norm=None if direct else RmsNorm(own("q_a_layernorm.weight"), _EPS),
        query_up=None if direct else queries,
        norm=RmsNorm(own("kv_a_layernorm.weight"), _EPS),
        up=own("kv_b_proj.weight"),
    )
    return heads, padded.reshape(len(out), -1).t()


def query_scale(rope: dict[str, Any]) -> float:
    """What yarn's `mscale_all_dim` multiplies scores by, as transformers does for DeepSeek-V3."""
    every = rope.get("mscale_all_dim", 0)
    if rope.get("rope_type", "default") == "default" or not every or rope["factor"] <= 1:
        return 1.0
    return float((0.1 * every * math.log(rope["factor"]) + 1.0) ** 2)
