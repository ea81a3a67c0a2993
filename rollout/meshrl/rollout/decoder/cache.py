"""The key-value cache: one dense rectangle of rows and positions per layer, grown when it must, bounded in bytes."""

from __future__ import annotations

import torch

LENGTH_STEP = 32
"""Lengths are multiples of this, so that shapes repeat."""


def rounded(length: int) -> int:
    """`length` up to the next multiple of LENGTH_STEP."""
    return -(-length // LENGTH_STEP) * LENGTH_STEP


class KvCache:
    """Keys and values of the running rows, which always are rows `0 … n - 1`.

    Dense rows cost one copied row when a request leaves (the last row moves into the gap) and save a gather in each
    decode step: attention reads a view. Each layer's tensors have shape [rows, K, length, D].
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        max_rows: int,
        max_bytes: int,
    ) -> None:
        self.rows = 0
        self.length = 0
        self._max_rows = max_rows
        self._max_bytes = max_bytes
        self._bytes_per_token = 2 * num_layers * num_kv_heads * head_dim * dtype.itemsize
        empty = torch.empty(0, num_kv_heads, 0, head_dim, dtype=dtype, device=device)
        self.keys = [empty] * num_layers
        self.values = [empty] * num_layers

    @property
    def longest_row(self) -> int:
        """Positions that a single row may have."""
        return self._max_bytes // self._bytes_per_token // LENGTH_STEP * LENGTH_STEP

    def rows_of(self, length: int) -> int:
        """How many rows of `length` positions respect the bounds."""
        return min(self._max_rows, self._max_bytes // (rounded(length) * self._bytes_per_token))

    def fits(self, rows: int, length: int) -> bool:
        """True when `rows` rows of `length` positions respect the bounds."""
        total = rows * rounded(length) * self._bytes_per_token
        return rows <= self._max_rows and total <= self._max_bytes

    def reserve(self, rows: int, length: int, *, longest: int) -> None:
        """Make room for `rows` rows of `length` positions; `longest` is what they may grow to.

        Grows in doublings; where that breaks the byte bound, takes exactly `rows` x `longest`, which the caller has
        checked with `fits`. What is stored stays, as far as the rectangle reaches.
        """
        if rows <= self.rows and length <= self.length:
            return
        new_rows, new_length = self.rows, self.length
        if rows > new_rows:
            new_rows = min(self._max_rows, 1 << (rows - 1).bit_length())
        if length > new_length:
            new_length = max(rounded(length), min(2 * self.length, rounded(longest)))
        if not self.fits(new_rows, new_length):
            new_rows, new_length = rows, rounded(longest)
        kept = (slice(min(self.rows, new_rows)), slice(None), slice(min(self.length, new_length)))
        for tensors in (self.keys, self.values):
            for index, old in enumerate(tensors):
                # Zeros, because masked positions are still multiplied: 0 x NaN would not be 0.
                shape = (new_rows, old.shape[1], new_length, old.shape[3])
                tensors[index] = torch.zeros(shape, dtype=old.dtype, device=old.device)
                tensors[index][kept] = old[kept]
        self.rows, self.length = new_rows, new_length

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of row `source` over row `target`."""
        for tensors in (self.keys, self.values):
            for tensor in tensors:
                tensor[target, :, :length] = tensor[source, :, :length]

    def clear(self, row: int) -> None:
        """Zero a row that holds values which are not finite."""
        for tensors in (self.keys, self.values):
            for tensor in tensors:
                tensor[row].zero_()
