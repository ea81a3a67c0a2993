"""The forward pass: a prompt into the cache, and one token for every running row; and the cache itself.

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
from meshrl.rollout.engines.torch.linear_attention import RowStates
from meshrl.rollout.engines.torch.operations import attend, attend_up_to, row_ends
from meshrl.rollout.engines.torch.weights import (
    AttentionLayer,
    DeltaRuleLayer,
    LayerWeights,
    Weights,
)

LENGTH_STEP = 32
"""Lengths are multiples of this, so that shapes repeat."""
STEADY_LENGTH = 256
"""A steady cache is at least so long."""


def rounded(length: int) -> int:
    """`length` up to the next multiple of LENGTH_STEP."""
    return -(-length // LENGTH_STEP) * LENGTH_STEP


class KvCache:
    """Keys and values of the running rows, which always are rows `0 … n - 1`.

    Dense rows cost one copied row when a request leaves (the last row moves into the gap) and save a gather in each
    decode step: attention reads a view. It reads every position of the rectangle, which therefore is no longer than
    rows are: a view without gaps is read twice as fast as one with gaps, and a copy every LENGTH_STEP tokens is
    cheap beside LENGTH_STEP readings.
    """

    def __init__(
        self,
        *,
        shape: tuple[int, int, int],
        dtype: torch.dtype,
        device: torch.device,
        max_rows: int,
        max_bytes: int,
        steady: bool = False,
        states: RowStates | None = None,
    ) -> None:
        """`steady`: its shape changes as seldom as can be, for an attention that reads each row to its end only.

        `shape` is of keys and values: layers, heads, head_dim. What other layers keep of the rows are `states`.
        """
        num_layers, num_kv_heads, head_dim = shape
        num_layers = max(1, num_layers)  # a length has to take some bytes
        self.states = states
        self._bytes_per_row = 0 if states is None else states.bytes_per_row
        self.rows = 0
        self.length = 0
        self.reshaped = 0
        """How often its memory has moved."""
        self._steady = steady
        self._num_kv_heads = num_kv_heads
        self._max_rows = max_rows
        self._max_bytes = max_bytes
        self._bytes_per_token = 2 * num_layers * num_kv_heads * head_dim * dtype.itemsize
        empty = torch.empty(0, dtype=dtype, device=device)
        self._buffers = [empty] * num_layers
        self._spare = empty
        """Into which the next layer is reshaped: memory that was touched before is much faster than new."""
        self.layers = [empty.view(2, 0, num_kv_heads, 0, head_dim)] * num_layers
        """Keys, then values, of each layer: [2, rows, K, length, D], the beginning of its buffer."""
        self._starts = torch.empty(0, 2 * num_kv_heads, dtype=torch.int64, device=device)

    @property
    def longest_row(self) -> int:
        """Positions that a single row may have."""
        left = max(0, self._max_bytes - self._bytes_per_row)
        return left // self._bytes_per_token // LENGTH_STEP * LENGTH_STEP

    @property
    def may_grow_by(self) -> int:
        """Bytes that it does not have yet, and may take."""
        held = sum(len(buffer) for buffer in (*self._buffers, self._spare)) * self._spare.itemsize
        return max(0, self._max_bytes - held)

    def rows_of(self, length: int) -> int:
        """How many rows of `length` positions respect the bounds."""
        row = rounded(length) * self._bytes_per_token + self._bytes_per_row
        return min(self._max_rows, self._max_bytes // row)

    def fits(self, rows: int, length: int) -> bool:
        """True when `rows` rows of `length` positions respect the bounds."""
        total = rows * (rounded(length) * self._bytes_per_token + self._bytes_per_row)
        return rows <= self._max_rows and total <= self._max_bytes

    def reserve(self, rows: int, length: int, *, kept: int) -> None:
        """Make room for `rows` rows of `length` positions, which the caller has checked with `fits`.

        Rows grow in doublings where those fit. Length grows in LENGTH_STEPs, and shrinks when a quarter of it is not
        needed, or, so that the shape of what begins does not depend on what was before, when nothing is kept. Of a
        steady cache length grows in doublings, too, and both shrink only for the sake of the other.

        Args:
            rows: Rows that will run.
            length: Positions of the longest of them.
            kept: How many rows, from the first on, keep their cache.
        """
        length = rounded(length)
        if self._steady:
            if rows > self.rows or length > self.length:
                self._grow(rows, length, kept)
            return
        spare = self.length - length
        if rows <= self.rows and (spare == 0 or (kept and 0 < 4 * spare < self.length)):
            return
        roomy = max(self.rows, min(self._max_rows, 1 << (rows - 1).bit_length()))
        self._reshape(roomy if self.fits(roomy, length) else rows, length, kept)

    def release(self) -> None:
        """Free all memory; what was held is lost, and `reserve` begins anew."""
        empty = self._spare.new_empty(0)
        self._buffers = [empty] * len(self.layers)
        self._spare = empty
        self.layers = [
            empty.view(2, 0, self._num_kv_heads, 0, layer.shape[-1]) for layer in self.layers
        ]
        self._starts = self._starts[:0]
        if self.states is not None:
            self.states.resize(0, 0)
        self.rows = self.length = 0
        self.reshaped += 1

    def places(self, positions: torch.Tensor) -> torch.Tensor:
        """Indices at which rows `0 … n - 1` store their next keys and values.

        Args:
            positions: int64[n], the position of each row's token.

        Returns:
            int64[n * 2 * K]: per row its key heads, then its value heads, as indices into a layer seen as [*, D].
        """
        return (self._starts[: len(positions)] + positions[:, None]).reshape(-1)

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of row `source` over row `target`."""
        for layer in self.layers:
            layer[:, target, :, :length] = layer[:, source, :, :length]
        if self.states is not None:
            self.states.move(source, target)

    def clear(self, row: int) -> None:
        """Zero a row that holds values which are not finite."""
        for layer in self.layers:
            layer[:, row].zero_()
        if self.states is not None:
            self.states.clear(row)

    def _grow(self, rows: int, length: int, kept: int) -> None:
        """Twice of what is wanted, as far as that fits; length first, which grows at each step."""
        roomy = max(self.rows, min(self._max_rows, 1 << (rows - 1).bit_length()))
        longer = max(self.length, STEADY_LENGTH, 1 << (length - 1).bit_length())
        wanted = ((roomy, longer), (rows, longer), (roomy, length), (rows, length))
        self._reshape(*next(each for each in wanted if self.fits(*each)), kept)

    def _reshape(self, rows: int, length: int, kept: int) -> None:
        shared = min(self.length, length)
        for index, old in enumerate(self.layers):
            shape = (2, rows, self._num_kv_heads, length, old.shape[-1])
            buffer = self._buffer(math.prod(shape))
            layer = buffer[: math.prod(shape)].view(shape)
            layer[:, :kept, :, :shared] = old[:, :kept, :, :shared]
            self.layers[index] = layer
            self._buffers[index], self._spare = buffer, self._buffers[index]
        if self.states is not None and rows != self.rows:
            self.states.resize(rows, kept)
        self.rows, self.length = rows, length
        self.reshaped += 1
        starts = torch.arange(2 * rows * self._num_kv_heads, device=self._starts.device) * length
        self._starts = starts.view(2, rows, -1).transpose(0, 1).reshape(rows, -1)

    def _buffer(self, size: int) -> torch.Tensor:
        """The spare buffer, or, where it has less than `size` numbers, one up to twice as large as it."""
        if size <= len(self._spare):
            return self._spare
        most = self._max_bytes // (len(self.layers) * self._spare.itemsize)
        # Zeros, because masked positions are still multiplied: 0 x NaN would not be 0.
        return self._spare.new_zeros(max(size, min(2 * len(self._spare), most)))


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
        stateful = [
            architecture.delta_rule_of(at) is not None for at in range(architecture.num_layers)
        ]
        self._numbers = [stateful[:at].count(stateful[at]) for at in range(len(stateful))]
        """Index of each layer among those of its kind, in the cache."""

    def prefill(
        self,
        weights: Weights,
        cache: KvCache,
        tokens: torch.Tensor,
        lengths: torch.Tensor,
        source: torch.Tensor,
        first_row: int,
        taken: torch.Tensor | None = None,
        every: list[torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Run padded prompts and store their keys and values in consecutive cache rows.

        Args:
            weights: The version to run.
            cache: Has room for the rows and P positions.
            tokens: int64[m, P], padded on the right.
            lengths: int64[m], true lengths.
            source: int64[r]: cache row `first_row + i` gets prompt `source[i]`; equal prompts are run once. It
                ascends and leaves no prompt out.
            first_row: First row of the cache to fill.
            taken: [m, P, layers, k], gets the experts of each token.
            every: Gets [m, P, C], of which `logits` makes those after each token.

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
            number = self._numbers[index]
            if isinstance(layer, DeltaRuleLayer):
                attended, *after = layer.rule.prefill(layer.input_norm(hidden), lengths)
                assert cache.states is not None
                for held, part in zip(cache.states.layers[number], after, strict=True):
                    held[rows] = part[source]
            else:
                heads = self._project(layer, hidden, cos, sin).transpose(1, 2)
                borders = (arch.num_heads, arch.num_heads + 2 * arch.num_kv_heads)
                queries, stored, gate = heads.tensor_split(borders, 1)
                keys, values = stored.chunk(2, 1)
                cached_keys, cached_values = cache.layers[number]
                cached_keys[rows, :, :width] = keys[source] if repeated else keys
                cached_values[rows, :, :width] = values[source] if repeated else values
                attended = F.scaled_dot_product_attention(
                    queries, keys, values, is_causal=True, enable_gqa=True
                )
                if arch.gated:
                    attended = attended * gate.sigmoid()
                attended = attended.transpose(1, 2)
            # The last layer computes only the prompts' last tokens, unless log-probs of all are wanted.
            if layer is weights.layers[-1] and taken is None and every is None:
                attended, hidden = attended[ends], hidden[ends]
            shape = hidden.shape
            flat = attended.reshape(-1, layer.out.shape[0])
            of_layer = None if taken is None else taken.flatten(0, 1)[:, index]
            hidden = self._finish(layer, hidden.view(-1, shape[-1]), flat, of_layer).view(shape)
        if every is not None:
            every.append(hidden)
        return self.logits(weights, hidden[ends] if hidden.dim() == 3 else hidden)

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
            positions: int64[n], the position of each token.
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
            number = self._numbers[index]
            if isinstance(layer, DeltaRuleLayer):
                assert cache.states is not None
                held = (part[:count] for part in cache.states.layers[number])
                attended = layer.rule.decode(layer.input_norm(hidden), *held)
            else:
                heads = self._project(layer, hidden, cos, sin)
                borders = (arch.num_heads, arch.num_heads + 2 * arch.num_kv_heads)
                queries, stored, gate = heads.tensor_split(borders, 1)
                cached = cache.layers[number]
                flat = stored.reshape(-1, arch.head_dim)
                cached.view(-1, arch.head_dim).index_copy_(0, places, flat)
                attended = attention(queries, *cached[:, :count])
                if arch.gated:
                    attended = attended * gate.flatten(1).sigmoid()
            of_layer = None if taken is None else taken[:, index]
            hidden = self._finish(layer, hidden, attended, of_layer)
        return self.logits(weights, hidden)

    def no_experts(self, *tokens: int) -> torch.Tensor:
        """[*tokens, layers, k] zeros, for `taken`: uint8, or int16 where there are more experts than that holds."""
        mixture = self.architecture.mixture
        experts, chosen = (0, 0) if mixture is None else (mixture.experts, mixture.chosen)
        dtype = torch.uint8 if experts <= BYTE_EXPERTS else torch.int16
        shape = (*tokens, self.architecture.num_layers, chosen)
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def _attention(self, positions: torch.Tensor, length: int) -> Attention:
        """The attention of rows up to their `positions`, in a cache of `length`."""
        heads, key_heads = self.architecture.num_heads, self.architecture.num_kv_heads
        if positions.is_cuda:
            return partial(attend_up_to, ends=row_ends(positions + 1, heads, key_heads, length))
        return partial(attend, mask=self._mask(positions.repeat_interleave(key_heads), length))

    def _mask(self, positions: torch.Tensor, length: int) -> torch.Tensor:
        """[len(positions), 1, length]: 0 up to each position, minus infinity after it."""
        windows = self._ahead.unfold(0, length, 1)
        return windows.index_select(0, len(self._ahead) // 2 - 1 - positions)[:, None]

    def _project(
        self, layer: AttentionLayer, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        """[..., C] to [..., H + 2K, D]: rotated queries, rotated keys, values; then H of the gate, if it is gated."""
        arch = self.architecture
        normed = layer.input_norm(hidden)
        heads = F.linear(normed, layer.qkv, layer.qkv_bias)
        heads = heads.view(*hidden.shape[:-1], -1, arch.head_dim)
        both = plain = heads[..., : arch.num_heads + arch.num_kv_heads, :]
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

    def logits(self, weights: Weights, hidden: torch.Tensor) -> torch.Tensor:
        """[..., C] to [..., V]."""
        normed = weights.final_norm(hidden)
        return F.linear(normed, weights.head)
