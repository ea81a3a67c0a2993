"""What each rank fetches of a batch: its own rows, about as many tokens as any other rank."""

from __future__ import annotations

import numpy as np
import pytest

from meshrl.contract.types import Batch, BatchRow, Outcome, Uid, Version
from meshrl.trainer.learner.experience import Schedule, schedule

GROUPS, SIZE = 32, 8


def batch(seed: int) -> Batch:
    """Prompts of 256 tokens, responses lognormal with a mean of 512 and at most 4,096."""
    draws = np.random.default_rng(seed)
    lengths = np.minimum(4096, draws.lognormal(np.log(512) - 0.32, 0.8, (GROUPS, SIZE))).astype(int)
    version = Version(1, 0)
    rows = [
        BatchRow(
            uid=Uid("run", f"t{group:02}", index),
            group=f"t{group:02}",
            group_size=SIZE,
            num_tokens=256 + int(lengths[group, index]),
            oldest=version,
            newest=version,
            outcome=Outcome.OK,
        )
        for group in range(GROUPS)
        for index in range(SIZE)
    ]
    return Batch.of_rows(rows, batch_id="b", run="run", step=0)


def planned(seed: int, ranks: int, mini: int | None, *, whole: bool = False) -> Schedule:
    return schedule(
        batch(seed), ranks=ranks, max_tokens=8192, mini_batch_groups=mini, whole_groups=whole
    )


def tokens(made: Schedule, rank: int) -> int:
    return sum(made.rows[row].num_tokens for row in made.own(rank))


@pytest.mark.parametrize("mini", [None, 16, 8])
@pytest.mark.parametrize(("ranks", "whole"), [(2, False), (4, False), (8, False), (4, True)])
def test_no_rank_moves_more_than_a_tenth_above_the_mean(
    ranks: int, whole: bool, mini: int | None
) -> None:
    for seed in range(20):
        made = planned(seed, ranks, mini, whole=whole)
        shares = [tokens(made, rank) for rank in range(ranks)]
        assert max(shares) <= 1.1 * sum(shares) / ranks


def test_every_row_is_fetched_by_exactly_one_rank() -> None:
    made = planned(0, 4, 8)
    fetched = [uid for rank in range(4) for uid in made.uids(rank)]
    assert sorted(fetched) == sorted(row.uid for row in made.rows)


def test_what_one_mini_batch_leaves_uneven_the_next_makes_up_for() -> None:
    """Eight groups on eight ranks: within a mini-batch each rank has one, whatever its size."""
    made = planned(0, 8, 8, whole=True)
    for mini in made.mini_batches:
        assert {len([row for micro in rank for row in micro]) for rank in mini.ranks} == {SIZE}
    together = max(tokens(made, rank) for rank in range(8)) - min(
        tokens(made, rank) for rank in range(8)
    )
    apart = sum(_spread(made, number) for number in range(len(made.mini_batches)))
    assert together < apart / 2


def _spread(made: Schedule, number: int) -> int:
    sizes = [
        sum(made.rows[row].num_tokens for micro in rank for row in micro)
        for rank in made.mini_batches[number].ranks
    ]
    return max(sizes) - min(sizes)
