"""Rows of different lengths without padding, and the sums that run along rows, groups and valid tokens.

A batch of B responses is one flat axis of N tokens, row after row:

    offsets  0        5    7            13          row i owns tokens offsets[i] … offsets[i+1]-1
    tokens   ● ● ○ ● ● ● ○ ● ● ● ● ● ●              ● the policy sampled it, ○ a tool did (mask False)
    groups   0         0    1                       rows that answer the same prompt

Shapes in docstrings: [N] one entry per token, [B] per row, [G] per group. Sums by row and by group run
in float64 and come back in the dtype of what was summed, so that the variance of equal rewards, summed in
float64, is exactly zero (in float32 eight rewards of 0.6 have a variance of rounding noise).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from meshrl.contract.errors import InfraError
from meshrl.trainer.algorithms.lazy_torch import Tensor, torch

MEAN_EPSILON = 1e-8
"""verl adds this to every count it divides by."""
LOG_RATIO_BOUND = 20.0
"""|log ratio| is clamped here before it is exponentiated; no gradient flows beyond."""


@dataclass(frozen=True, kw_only=True)
class Ragged:
    """The layout of B rows over N tokens; it holds no values."""

    offsets: Tensor
    """int64[B + 1], ascending, from 0 to N."""
    mask: Tensor
    """bool[N]: True where the policy sampled the token and it shall be trained on."""
    groups: Tensor
    """int64[B]: rows with the same number answer the same prompt; any non-negative numbers."""

    @classmethod
    def from_lengths(cls, lengths: Tensor, mask: Tensor, groups: Tensor | None = None) -> Ragged:
        """Layout of rows with `lengths` int64[B] tokens; without `groups` every row is alone.

        Raises:
            InfraError: the lengths do not add up to the tokens of the mask.
        """
        offsets = torch.zeros(len(lengths) + 1, dtype=torch.int64, device=mask.device)
        offsets[1:] = lengths.to(mask.device).cumsum(0)
        if int(offsets[-1]) != len(mask):
            raise InfraError(f"rows add up to {int(offsets[-1])} tokens, the mask has {len(mask)}")
        if groups is None:
            groups = torch.arange(len(lengths), device=mask.device)
        return cls(offsets=offsets, mask=mask.bool(), groups=groups.to(mask.device))

    @classmethod
    def from_padded(cls, mask: Tensor, groups: Tensor | None = None) -> Ragged:
        """Layout of a padded [B, T] batch: rows of T tokens, padding masked; see `flatten`."""
        lengths = torch.full((mask.shape[0],), mask.shape[1], device=mask.device)
        return cls.from_lengths(lengths, mask.reshape(-1), groups)

    @property
    def num_rows(self) -> int:
        """B."""
        return len(self.offsets) - 1

    @property
    def num_tokens(self) -> int:
        """N, masked tokens included."""
        return len(self.mask)

    @cached_property
    def lengths(self) -> Tensor:
        """int64[B]: tokens of each row, masked ones included."""
        return self.offsets.diff()

    @cached_property
    def rows(self) -> Tensor:
        """int64[N]: the row of each token."""
        numbers = torch.arange(self.num_rows, device=self.mask.device)
        return numbers.repeat_interleave(self.lengths, output_size=self.num_tokens)

    @cached_property
    def valid_lengths(self) -> Tensor:
        """L, int64[B]: trained tokens of each row."""
        return _sum_by(self.mask.long(), self.rows, self.num_rows)

    @cached_property
    def nonempty(self) -> Tensor:
        """bool[B]: rows with a trained token."""
        return self.valid_lengths > 0

    @cached_property
    def num_valid(self) -> Tensor:
        """int64 scalar: trained tokens of all rows."""
        return self.mask.sum()

    @cached_property
    def num_groups(self) -> int:
        """G, the highest group number plus one: a number in between may own no row."""
        return int(self.groups.max()) + 1 if self.num_rows else 0

    @cached_property
    def group_counts(self) -> Tensor:
        """int64[G]: rows of each group."""
        return torch.bincount(self.groups, minlength=self.num_groups)

    @cached_property
    def alone(self) -> Tensor:
        """bool[B]: rows without a sibling in the batch."""
        return self.group_counts[self.groups] == 1

    @cached_property
    def positions(self) -> Tensor:
        """int64[N]: place of each token within its row, from 0."""
        return torch.arange(self.num_tokens, device=self.mask.device) - self.offsets[self.rows]

    def with_mask(self, mask: Tensor) -> Ragged:
        """The same rows with another mask bool[N]: what rejection leaves."""
        return replace(self, mask=mask.bool())

    def valid_only(self) -> Ragged:
        """The rows without their masked tokens; values follow with `values[mask]`."""
        return Ragged.from_lengths(self.valid_lengths, self.mask[self.mask], self.groups)

    def from_valid(self, values: Tensor) -> Tensor:
        """The inverse of `values[mask]`: trained tokens' values to [N], 0 at masked ones."""
        return values.new_zeros(self.num_tokens).masked_scatter(self.mask, values)

    def next_in_row(self, values: Tensor) -> Tensor:
        """[N] to [N]: at t the row's value at t + 1, 0 at its last token."""
        last = self.positions == self.lengths[self.rows] - 1
        return torch.where(last, values.new_zeros(()), values.roll(-1))

    def to_tokens(self, row_values: Tensor) -> Tensor:
        """[B] to [N]: each row's value at every trained token, 0 at masked ones."""
        return torch.where(self.mask, row_values[self.rows], row_values.new_zeros(()))

    def row_sum(self, values: Tensor, *, masked: bool = True) -> Tensor:
        """[N] to [B]: the sum along each row, over trained tokens or (`masked=False`) over all."""
        chosen = torch.where(self.mask, values, values.new_zeros(())) if masked else values
        return _sum_by(chosen, self.rows, self.num_rows)

    def row_mean(self, values: Tensor) -> Tensor:
        """[N] to [B]: the mean over trained tokens; 0 for a row without any."""
        return self.row_sum(values) / (self.valid_lengths + MEAN_EPSILON)

    def row_max(self, values: Tensor) -> Tensor:
        """[N] to [B]: the maximum over trained tokens; 0 for a row without any."""
        lowest = values.new_full((self.num_rows,), -torch.inf)
        chosen = torch.where(self.mask, values, values.new_full((), -torch.inf))
        top = lowest.scatter_reduce(0, self.rows, chosen, "amax")
        return torch.where(self.nonempty, top, 0.0)

    def token_sum(self, values: Tensor) -> Tensor:
        """[N] to a scalar: the sum over trained tokens; NaN and inf at masked ones are harmless."""
        chosen = torch.where(self.mask, values, values.new_zeros(()))
        return chosen.sum()

    def token_mean(self, values: Tensor) -> Tensor:
        """[N] to a scalar: the mean over trained tokens, 0 without any."""
        return self.token_sum(values) / (self.num_valid + MEAN_EPSILON)

    def group_sum(self, row_values: Tensor) -> Tensor:
        """[B] to [G]."""
        return _sum_by(row_values, self.groups, self.num_groups)

    def group_mean(self, row_values: Tensor) -> Tensor:
        """[B] to [G]; 0 for a group without rows."""
        return self.group_sum(row_values) / self.group_counts.clamp(min=1)

    def group_max(self, row_values: Tensor) -> Tensor:
        """[B] to [G]; -inf for a group without rows."""
        lowest = row_values.new_full((self.num_groups,), -torch.inf)
        return lowest.scatter_reduce(0, self.groups, row_values, "amax")

    def first_of_group(self, rows: Tensor) -> Tensor:
        """bool[B] to bool[B]: the first one of `rows` in each group."""
        numbers = torch.arange(self.num_rows, device=rows.device)
        candidates = torch.where(rows, numbers, self.num_rows)
        none_yet = torch.full((self.num_groups,), self.num_rows, device=rows.device)
        return none_yet.scatter_reduce(0, self.groups, candidates, "amin")[self.groups] == numbers

    def group_std(self, row_values: Tensor) -> Tensor:
        """[B] to [G]: unbiased (n - 1) standard deviation; 0 below two rows, exactly 0 for equal rows."""
        exact = row_values.double()
        residual = exact - self.group_mean(exact)[self.groups]
        variance = self.group_sum(residual.square()) / (self.group_counts - 1).clamp(min=1)
        return variance.sqrt().to(row_values.dtype)

    def row_cumsum(self, values: Tensor) -> Tensor:
        """[N] to [N]: running sum within each row."""
        return self._scan_forward(torch.ones_like(values), values)

    def suffix_sum(self, values: Tensor) -> Tensor:
        """[N] to [N]: at t the sum of the row's values from t on (the reward to go)."""
        return self.discounted_suffix_sum(values, torch.ones_like(values))

    def discounted_suffix_sum(self, values: Tensor, decay: Tensor) -> Tensor:
        """Solve x_t = values_t + decay_t · x_{t+1} within each row, [N] to [N], x = 0 behind the row.

        A doubling scan: log2(longest row) vectorised steps instead of a loop over tokens.
        """
        flipped = self._reversed()
        return flipped._scan_forward(decay.flip(0), values.flip(0)).flip(0)

    def _reversed(self) -> Ragged:
        """The layout of tokens read backwards."""
        return Ragged.from_lengths(self.lengths.flip(0), self.mask.flip(0), self.groups.flip(0))

    def _scan_forward(self, decay: Tensor, values: Tensor) -> Tensor:
        """Solve x_t = values_t + decay_t · x_{t-1} within each row (Hillis and Steele, 1986)."""
        factor = torch.where(self.positions == 0, 0.0, decay.double())
        state = values.double()
        longest = int(self.lengths.max()) if self.num_rows else 0
        step = 1
        while step < longest:
            reached = torch.cat([torch.zeros_like(state[:step]), state[:-step]])
            earlier = torch.cat([torch.zeros_like(factor[:step]), factor[:-step]])
            state = state + factor * reached
            factor = factor * earlier
            step *= 2
        return state.to(values.dtype)


def _sum_by(values: Tensor, index: Tensor, size: int) -> Tensor:
    """Sum `values` into `size` bins: floats in float64, back in their own dtype."""
    wide = values.double() if values.is_floating_point() else values
    return wide.new_zeros(size).index_add(0, index, wide).to(values.dtype)


def flatten(padded: Tensor) -> Tensor:
    """[B, T] values in the layout of `Ragged.from_padded`."""
    return padded.reshape(-1)


def variance(ragged: Ragged, values: Tensor) -> Tensor:
    """Unbiased variance over all trained tokens, [N] to a scalar; 0 of fewer than two."""
    count = ragged.num_valid
    centred = values - ragged.token_mean(values)
    return ragged.token_mean(centred.square()) * count / (count - 1).clamp(min=1)


def whiten(ragged: Ragged, values: Tensor, *, shift_mean: bool = True) -> Tensor:
    """Zero mean (unless `shift_mean` is False) and unit variance over trained tokens, [N] to [N].

    Long rows weigh more, because each token counts once. Masked tokens come back as 0.
    """
    mean = ragged.token_mean(values)
    white = (values - mean) * torch.rsqrt(variance(ragged, values) + 1e-8)
    if not shift_mean:
        white = white + mean
    return torch.where(ragged.mask, white, white.new_zeros(()))
