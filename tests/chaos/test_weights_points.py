"""A few of the points of `python -m tests.chaos.weights_points`, which runs all of them: one real kill a carrier."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from .weights_points import POINTS, run

CHOSEN = {
    "middle bucket arrived",
    "COMMIT received",
    "first COMMITTED received, queue not yet informed",
}


def test_there_are_twenty_points_all_different() -> None:
    assert len({(point.role, point.at, point.joining) for point in POINTS}) == len(POINTS) == 20


async def test_survivors_commit_and_the_killed_or_stopped_replica_comes_back(
    tmp_path: Path,
) -> None:
    points = [point for point in POINTS if point.name in CHOSEN]
    outcomes = await run(tmp_path, "shm", points)
    assert [outcome for outcome in outcomes if not outcome.ok] == []
    assert len(outcomes) == 2 * len(CHOSEN)
    assert {outcome.signal for outcome in outcomes} == {signal.SIGKILL.name, signal.SIGSTOP.name}


ENDS = ("first bucket arrived", "last bucket arrived", "middle bucket acknowledged")
"""A receiver's death at two buckets, and the trainer's."""


@pytest.mark.parametrize(("carrier", "ends"), [("gloo", ENDS), ("disk", ENDS[-1:])])
async def test_the_others_go_on_when_an_end_of_a_transfer_is_killed(
    tmp_path: Path, carrier: str, ends: tuple[str, ...]
) -> None:
    # A death breaks connections: no deadline finds it, and a busy machine must not be taken for one.
    points = [point for point in POINTS if point.name in ends]
    outcomes = await run(tmp_path, carrier, points, [signal.SIGKILL], slowly=10.0)
    assert [outcome.fault for outcome in outcomes] == [""] * len(ends)


async def test_a_receiver_into_lent_memory_that_is_killed_or_stopped_in_a_bucket_comes_back(
    tmp_path: Path,
) -> None:
    points = [point for point in POINTS if point.name == "middle bucket arrived"]
    outcomes = await run(tmp_path, "nccl", points, slowly=2.0, lends=True)
    assert [outcome.fault for outcome in outcomes] == ["", ""]
