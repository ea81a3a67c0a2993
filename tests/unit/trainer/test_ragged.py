"""Sums along rows, groups and trained tokens of a batch without padding."""

from __future__ import annotations

import pytest
import torch

from meshrl.contract.errors import InfraError
from meshrl.trainer.algorithms.ragged import Ragged, whiten


@pytest.fixture
def ragged() -> Ragged:
    """Rows of 3, 0, 1 and 4 tokens; groups 0, 0, 2, 2."""
    mask = torch.tensor([1, 0, 1, 1, 0, 0, 1, 1]).bool()
    return Ragged.from_lengths(torch.tensor([3, 0, 1, 4]), mask, torch.tensor([0, 0, 2, 2]))


def test_lengths_must_cover_the_tokens() -> None:
    with pytest.raises(InfraError, match="add up to 3 tokens, the mask has 2"):
        Ragged.from_lengths(torch.tensor([1, 2]), torch.ones(2, dtype=torch.bool))


def test_rows_groups_and_positions(ragged: Ragged) -> None:
    assert ragged.rows.tolist() == [0, 0, 0, 2, 3, 3, 3, 3]
    assert ragged.positions.tolist() == [0, 1, 2, 0, 0, 1, 2, 3]
    assert ragged.valid_lengths.tolist() == [2, 0, 1, 2]
    assert ragged.nonempty.tolist() == [True, False, True, True]
    assert ragged.group_counts.tolist() == [2, 0, 2]
    assert not ragged.alone.any()


def test_row_statistics_skip_masked_tokens_whatever_they_hold(ragged: Ragged) -> None:
    values = torch.tensor([1.0, torch.nan, 3, 5, torch.inf, -torch.inf, 7, 8])
    assert ragged.row_sum(values).tolist() == [4, 0, 5, 15]
    torch.testing.assert_close(ragged.row_mean(values), torch.tensor([2.0, 0, 5, 7.5]))
    assert ragged.row_max(values).tolist() == [3, 0, 5, 8]
    assert float(ragged.token_mean(values)) == pytest.approx(24 / 5)
    assert ragged.row_sum(torch.ones(8), masked=False).tolist() == [3, 0, 1, 4]


def test_group_statistics(ragged: Ragged) -> None:
    scores = torch.tensor([1.0, 3.0, 5.0, 5.0])
    assert ragged.group_mean(scores).tolist() == [2, 0, 5]
    torch.testing.assert_close(ragged.group_std(scores), torch.tensor([2.0**0.5, 0, 0]))


def test_scans_stay_within_their_row(ragged: Ragged) -> None:
    ones = torch.ones(8)
    assert ragged.row_cumsum(ones).tolist() == [1, 2, 3, 1, 1, 2, 3, 4]
    assert ragged.suffix_sum(ones).tolist() == [3, 2, 1, 1, 4, 3, 2, 1]
    halved = ragged.discounted_suffix_sum(ones, torch.full((8,), 0.5))
    assert halved.tolist() == [1.75, 1.5, 1, 1, 1.875, 1.75, 1.5, 1]
    assert ragged.next_in_row(torch.arange(8.0)).tolist() == [1, 2, 0, 0, 5, 6, 7, 0]


def test_a_long_scan_equals_the_loop() -> None:
    torch.manual_seed(0)
    lengths = torch.tensor([1000, 1, 777])
    layout = Ragged.from_lengths(lengths, torch.ones(1778, dtype=torch.bool))
    values, decay = torch.randn(1778), torch.rand(1778)

    expected = torch.zeros(1778, dtype=torch.float64)
    for start, end in zip([0, 1000, 1001], [1000, 1001, 1778], strict=True):
        running = 0.0
        for t in reversed(range(start, end)):
            running = float(values[t]) + float(decay[t]) * running
            expected[t] = running

    torch.testing.assert_close(
        layout.discounted_suffix_sum(values, decay).double(), expected, atol=1e-5, rtol=1e-5
    )


def test_squeezing_masked_tokens_out_and_back(ragged: Ragged) -> None:
    values = torch.arange(8.0) + 1
    dense = ragged.valid_only()
    assert dense.lengths.tolist() == [2, 0, 1, 2]
    assert ragged.from_valid(values[ragged.mask]).tolist() == [1, 0, 3, 4, 0, 0, 7, 8]


def test_fewer_than_two_tokens_are_whitened_to_zero(ragged: Ragged) -> None:
    for trained in (0, 1):
        few = ragged.with_mask(torch.arange(8) < trained)
        assert (whiten(few, torch.full((8,), 3.0)) == 0).all()


def test_gradients_flow_through_row_sums(ragged: Ragged) -> None:
    values = torch.ones(8, requires_grad=True)
    (gradient,) = torch.autograd.grad((ragged.row_sum(values) * torch.arange(4)).sum(), values)

    assert gradient.tolist() == [0, 0, 0, 2, 0, 0, 3, 3]
