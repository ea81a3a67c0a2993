"""The key-value cache: one dense rectangle of rows and positions per layer, reshaped with need, bounded in bytes."""

from __future__ import annotations

import math

import torch

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
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        max_rows: int,
        max_bytes: int,
        steady: bool = False,
    ) -> None:
        """`steady`: its shape changes as seldom as can be, for an attention that reads each row to its end only."""
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
        return self._max_bytes // self._bytes_per_token // LENGTH_STEP * LENGTH_STEP

    @property
    def may_grow_by(self) -> int:
        """Bytes that it does not have yet, and may take."""
        held = sum(len(buffer) for buffer in (*self._buffers, self._spare)) * self._spare.itemsize
        return max(0, self._max_bytes - held)

    def rows_of(self, length: int) -> int:
        """How many rows of `length` positions respect the bounds."""
        return min(self._max_rows, self._max_bytes // (rounded(length) * self._bytes_per_token))

    def fits(self, rows: int, length: int) -> bool:
        """True when `rows` rows of `length` positions respect the bounds."""
        total = rows * rounded(length) * self._bytes_per_token
        return rows <= self._max_rows and total <= self._max_bytes

    def reserve(self, rows: int, length: int, *, kept: int) -> None:
        """Make room for `rows` rows of `length` positions, which the caller has checked with `fits`.

        Rows grow in doublings where those fit. Length grows in LENGTH_STEPs, and shrinks when a quarter of it is not
        needed, or, so that the shape of what begins does not depend on what was before, when nothing is kept. Of a
        steady cache length grows in doublings, too, and both shrink only for the sake of the other.

        Args:
            rows: Rows that will run.
            length: Positions of the longest of them.
            kept: The first so many rows keep what they hold.
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
        self.rows = self.length = 0
        self.reshaped += 1

    def places(self, positions: torch.Tensor) -> torch.Tensor:
        """Where rows `0 … n - 1` store their next keys and values.

        Args:
            positions: int64[n], where each row's token stands.

        Returns:
            int64[n * 2 * K]: per row its key heads, then its value heads, as indices into a layer seen as [*, D].
        """
        return (self._starts[: len(positions)] + positions[:, None]).reshape(-1)

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of row `source` over row `target`."""
        for layer in self.layers:
            layer[:, target, :, :length] = layer[:, source, :, :length]

    def clear(self, row: int) -> None:
        """Zero a row that holds values which are not finite."""
        for layer in self.layers:
            layer[:, row].zero_()

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
