"""A few of the points of `python -m tests.chaos.weights_points`, which runs all of them."""

from __future__ import annotations

import signal
from pathlib import Path

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


async def test_a_receiver_into_lent_memory_that_is_killed_or_stopped_in_a_bucket_comes_back(
    tmp_path: Path,
) -> None:
    points = [point for point in POINTS if point.name == "middle bucket arrived"]
    outcomes = await run(tmp_path, "nccl", points, slowly=2.0, lends=True)
    assert [outcome.fault for outcome in outcomes] == ["", ""]
