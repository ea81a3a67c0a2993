"""The forward pass: a prompt into the cache, and one token for every running row.

Shapes: n rows, P padded prompt length, L attended positions, C hidden, H query heads, K key heads, D head_dim.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from meshrl.rollout.decoder.architecture import Architecture
from meshrl.rollout.decoder.cache import KvCache, rounded
from meshrl.rollout.decoder.weights import LayerWeights, Weights


class Decoder:
    """Computes logits. Holds no weights and no state of a request: those are arguments."""

    def __init__(
        self, architecture: Architecture, dtype: torch.dtype, device: torch.device, max_length: int
    ) -> None:
        self.architecture = architecture
        self.dtype = dtype
        self.device = device
        cos, sin = architecture.rotation(max_length, device)
        self._cos, self._sin = cos.to(dtype), sin.to(dtype)
        self._positions = torch.arange(rounded(max_length), device=device)
        self._heads = torch.arange(architecture.num_kv_heads, device=device)

    def prefill(
        self,
        weights: Weights,
        cache: KvCache,
        tokens: torch.Tensor,
        lengths: torch.Tensor,
        source: torch.Tensor,
        first_row: int,
    ) -> torch.Tensor:
        """Run padded prompts and store their keys and values in consecutive cache rows.

        Args:
            weights: The version to run.
            cache: Has room for the rows and P positions.
            tokens: int64[m, P], padded on the right.
            lengths: int64[m], true lengths.
            source: int64[r]: cache row `first_row + i` gets prompt `source[i]`; equal prompts are run once.
            first_row: Where the rows begin.

        Returns:
            float32[m, V]: logits of the token after each prompt.
        """
        width = tokens.shape[1]
        cos, sin = self._cos[:width, None], self._sin[:width, None]
        hidden = weights.embedding[tokens]
        rows = slice(first_row, first_row + len(source))
        for index, layer in enumerate(weights.layers):
            queries, keys, values = self._project(layer, hidden, cos, sin)
            queries, keys, values = (t.transpose(1, 2) for t in (queries, keys, values))
            cache.keys[index][rows, :, :width] = keys[source]
            cache.values[index][rows, :, :width] = values[source]
            attended = F.scaled_dot_product_attention(
                queries, keys, values, is_causal=True, enable_gqa=True
            )
            flat = attended.transpose(1, 2).reshape(-1, layer.out.shape[0])
            hidden = self._finish(layer, hidden.view(-1, hidden.shape[-1]), flat).view_as(hidden)
        last = hidden[torch.arange(len(lengths), device=self.device), lengths - 1]
        return self._logits(weights, last)

    def decode(
        self,
        weights: Weights,
        cache: KvCache,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        attend: int,
    ) -> torch.Tensor:
        """Feed one token to each of the rows `0 … n - 1`.

        Args:
            weights: The version to run.
            cache: Holds every earlier position of each row.
            tokens: int64[n]
            positions: int64[n], where each token stands.
            attend: L, at least the largest position + 1.

        Returns:
            float32[n, V]: logits of the next token.
        """
        arch = self.architecture
        count = len(tokens)
        cos, sin = self._cos[positions][:, None], self._sin[positions][:, None]
        visible = self._positions[:attend] <= positions[:, None]
        mask = torch.zeros(count, 1, 1, attend, dtype=self.dtype, device=self.device)
        mask.masked_fill_(~visible[:, None, None], -math.inf)
        rows = torch.arange(count, device=self.device)[:, None] * arch.num_kv_heads + self._heads
        place = (rows * cache.length + positions[:, None]).view(-1)
        group = arch.num_heads // arch.num_kv_heads
        hidden = weights.embedding[tokens]
        for index, layer in enumerate(weights.layers):
            queries, keys, values = self._project(layer, hidden, cos, sin)
            cached_keys, cached_values = cache.keys[index], cache.values[index]
            cached_keys.view(-1, arch.head_dim).index_copy_(
                0, place, keys.reshape(-1, arch.head_dim)
            )
            cached_values.view(-1, arch.head_dim).index_copy_(
                0, place, values.reshape(-1, arch.head_dim)
            )
            # The query heads that share a key head stand as a sequence of queries: no key is repeated.
            attended = F.scaled_dot_product_attention(
                queries.reshape(count, arch.num_kv_heads, group, arch.head_dim),
                cached_keys[:count, :, :attend],
                cached_values[:count, :, :attend],
                attn_mask=mask,
            )
            hidden = self._finish(layer, hidden, attended.reshape(count, -1))
        return self._logits(weights, hidden)

    def _project(
        self, layer: LayerWeights, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rotated queries [..., H, D], rotated keys and plain values [..., K, D]."""
        arch = self.architecture
        normed = F.rms_norm(hidden, hidden.shape[-1:], layer.input_norm, arch.rms_norm_eps)
        joined = F.linear(normed, layer.qkv, layer.qkv_bias)
        joined = joined.view(*hidden.shape[:-1], -1, arch.head_dim)
        both = joined[..., : -arch.num_kv_heads, :]
        if layer.qk_norm is not None:
            both = F.rms_norm(both, both.shape[-1:], None, arch.rms_norm_eps) * layer.qk_norm
        rotated = torch.addcmul(both * cos, both.roll(arch.head_dim // 2, -1), sin)
        return (
            rotated[..., : arch.num_heads, :],
            rotated[..., arch.num_heads :, :],
            joined[..., -arch.num_kv_heads :, :],
        )

    def _finish(
        self, layer: LayerWeights, hidden: torch.Tensor, attended: torch.Tensor
    ) -> torch.Tensor:
        """The rest of a layer after attention: [t, C] and [t, H D] to [t, C]."""
        hidden = torch.addmm(hidden, attended, layer.out)
        if layer.out_bias is not None:
            hidden = hidden + layer.out_bias
        eps = self.architecture.rms_norm_eps
        normed = F.rms_norm(hidden, hidden.shape[-1:], layer.post_norm, eps)
        gate, up = F.linear(normed, layer.gate_up, layer.gate_up_bias).chunk(2, -1)
        hidden = torch.addmm(hidden, F.silu(gate).mul_(up), layer.down)
        return hidden if layer.down_bias is None else hidden + layer.down_bias

    def _logits(self, weights: Weights, hidden: torch.Tensor) -> torch.Tensor:
        eps = self.architecture.rms_norm_eps
        normed = F.rms_norm(hidden, hidden.shape[-1:], weights.final_norm, eps)
        return F.linear(normed, weights.head).float()
