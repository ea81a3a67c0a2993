"""The forward pass: a prompt into the cache, and one token for every running row.

Shapes: n rows, P padded prompt length, L attended positions, C hidden, H query heads, K key heads, D head_dim.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

from meshrl.contract.routed_experts import BYTE_EXPERTS
from meshrl.rollout.engines.torch.architecture import DecoderArchitecture
from meshrl.rollout.engines.torch.cache import KvCache, rounded
from meshrl.rollout.engines.torch.operations import attend, attend_up_to, row_ends
from meshrl.rollout.engines.torch.weights import LayerWeights, Weights

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Queries [n, H, D], keys and values [n, K, L, D] to [n, H D]."""


class TorchDecoder:
    """Computes logits. Holds no weights and no state of a request: those are arguments."""

    def __init__(
        self,
        architecture: DecoderArchitecture,
        dtype: torch.dtype,
        device: torch.device,
        max_length: int,
    ) -> None:
        self.architecture = architecture
        self.dtype = dtype
        self.device = device
        cos, sin = architecture.rotation(max_length, device)
        self._rotation = torch.stack((cos, sin), 1)[:, :, None].to(dtype)
        """[max_length, 2, 1, D]"""
        longest = rounded(max_length)
        ahead = torch.zeros(2 * longest, dtype=dtype, device=device)
        ahead[longest:] = -math.inf
        self._ahead = ahead
        """A window of it that ends in L - 1 - p of the infinities hides from position p what comes after."""

    def prefill(
        self,
        weights: Weights,
        cache: KvCache,
        tokens: torch.Tensor,
        lengths: torch.Tensor,
        source: torch.Tensor,
        first_row: int,
        taken: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run padded prompts and store their keys and values in consecutive cache rows.

        Args:
            weights: The version to run.
            cache: Has room for the rows and P positions.
            tokens: int64[m, P], padded on the right.
            lengths: int64[m], true lengths.
            source: int64[r]: cache row `first_row + i` gets prompt `source[i]`; equal prompts are run once. It
                ascends and leaves no prompt out.
            first_row: Where the rows begin.
            taken: [m, P, layers, k], gets the experts of each token.

        Returns:
            [m, V]: logits of the token after each prompt.
        """
        arch = self.architecture
        width = tokens.shape[1]
        cos, sin = self._rotation[:width].unbind(1)
        hidden = weights.embedding[tokens]
        rows = slice(first_row, first_row + len(source))
        repeated = len(source) > len(tokens)
        ends = torch.arange(len(lengths), device=self.device), lengths - 1
        for index, layer in enumerate(weights.layers):
            heads = self._project(layer, hidden, cos, sin).transpose(1, 2)
            queries, stored = heads.tensor_split((arch.num_heads,), 1)
            keys, values = stored.chunk(2, 1)
            cached_keys, cached_values = cache.layers[index]
            cached_keys[rows, :, :width] = keys[source] if repeated else keys
            cached_values[rows, :, :width] = values[source] if repeated else values
            attended = F.scaled_dot_product_attention(
                queries, keys, values, is_causal=True, enable_gqa=True
            ).transpose(1, 2)
            # Of the last layer only the prompts' last tokens are wanted, but for their experts.
            if layer is weights.layers[-1] and taken is None:
                attended, hidden = attended[ends], hidden[ends]
            shape = hidden.shape
            flat = attended.reshape(-1, layer.out.shape[0])
            of_layer = None if taken is None else taken.flatten(0, 1)[:, index]
            hidden = self._finish(layer, hidden.view(-1, shape[-1]), flat, of_layer).view(shape)
        return self._logits(weights, hidden if taken is None else hidden[ends])

    def decode(
        self,
        weights: Weights,
        cache: KvCache,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        taken: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Feed one token to each of the rows `0 … n - 1`.

        Args:
            weights: The version to run.
            cache: Holds every earlier position of each row and has room for one more.
            tokens: int64[n]
            positions: int64[n], where each token stands.
            taken: [n, layers, k], gets the experts of each token.

        Returns:
            [n, V]: logits of the next token.
        """
        arch = self.architecture
        count = len(tokens)
        cos, sin = self._rotation[positions].unbind(1)
        places = cache.places(positions)
        attention = self._attention(positions, cache.length)
        hidden = weights.embedding[tokens]
        for index, layer in enumerate(weights.layers):
            heads = self._project(layer, hidden, cos, sin)
            queries, stored = heads.tensor_split((arch.num_heads,), 1)
            cached = cache.layers[index]
            cached.view(-1, arch.head_dim).index_copy_(0, places, stored.reshape(-1, arch.head_dim))
            keys, values = cached[:, :count]
            of_layer = None if taken is None else taken[:, index]
            hidden = self._finish(layer, hidden, attention(queries, keys, values), of_layer)
        return self._logits(weights, hidden)

    def no_experts(self, *tokens: int) -> torch.Tensor:
        """[*tokens, layers, k] zeros, for `taken`: uint8, or int16 where there are more experts than that holds."""
        mixture = self.architecture.mixture
        experts, chosen = (0, 0) if mixture is None else (mixture.experts, mixture.chosen)
        dtype = torch.uint8 if experts <= BYTE_EXPERTS else torch.int16
        shape = (*tokens, self.architecture.num_layers, chosen)
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def _attention(self, positions: torch.Tensor, length: int) -> Attention:
        """That of rows up to their `positions`, in a cache of `length`."""
        heads, key_heads = self.architecture.num_heads, self.architecture.num_kv_heads
        if positions.is_cuda:
            return partial(attend_up_to, ends=row_ends(positions + 1, heads, key_heads, length))
        return partial(attend, mask=self._mask(positions.repeat_interleave(key_heads), length))

    def _mask(self, positions: torch.Tensor, length: int) -> torch.Tensor:
        """[len(positions), 1, length]: 0 up to each position, minus infinity after it."""
        windows = self._ahead.unfold(0, length, 1)
        return windows.index_select(0, len(self._ahead) // 2 - 1 - positions)[:, None]

    def _project(
        self, layer: LayerWeights, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        """[..., C] to [..., H + 2K, D]: rotated queries, rotated keys, values."""
        arch = self.architecture
        normed = layer.input_norm(hidden)
        heads = F.linear(normed, layer.qkv, layer.qkv_bias)
        heads = heads.view(*hidden.shape[:-1], -1, arch.head_dim)
        both = plain = heads[..., : -arch.num_kv_heads, :]
        if layer.qk_norm is not None:
            plain = layer.qk_norm(both)
        torch.addcmul(plain * cos, plain.roll(arch.head_dim // 2, -1), sin, out=both)
        return heads

    def _finish(
        self,
        layer: LayerWeights,
        hidden: torch.Tensor,
        attended: torch.Tensor,
        taken: torch.Tensor | None,
    ) -> torch.Tensor:
        """The rest of a layer after attention: [t, C] and [t, H D] to [t, C]. Overwrites `hidden`."""
        hidden.addmm_(attended, layer.out)
        if layer.out_bias is not None:
            hidden += layer.out_bias
        return layer.mlp.add_to(hidden, layer.post_norm(hidden), taken)

    def _logits(self, weights: Weights, hidden: torch.Tensor) -> torch.Tensor:
        normed = weights.final_norm(hidden)
        return F.linear(normed, weights.head)
