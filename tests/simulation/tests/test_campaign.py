"""Campaigns run their seeds in forks: every report comes back, and a run that takes its process along is named."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest

from tests.simulation import campaign as campaigns
from tests.simulation.campaign import campaign
from tests.simulation.mesh import Report


def ran(seed: int) -> Report:
    """A run that fails in every tenth seed."""
    return Report(
        seed=seed,
        problems=["a row is lost"] if seed % 10 == 0 else [],
        log=["a line"],
        events=2,
        calls=3,
        virtual_s=1.0,
        trace_hash="",
        samplings=Counter({"0-0": 1}),
        trained=4,
    )


def test_every_seed_is_run_and_its_report_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(campaigns, "RUNS_OF_A_FORK", 4)
    told: list[Report] = []
    totals = campaign(iter(range(11)), told=told.append, run=ran)
    assert told == [ran(seed) for seed in range(11)]
    assert (totals.seeds, totals.events, totals.calls, totals.rows) == (11, 22, 33, 44)
    assert totals.failed == (0, 10)


def test_a_campaign_without_time_runs_nothing() -> None:
    assert campaign(iter(range(11)), minutes=0, told=print, run=ran).seeds == 0


@pytest.mark.parametrize("ends", [lambda: os._exit(3), lambda: os.kill(os.getpid(), 9)])
def test_a_run_that_ends_its_process_ends_the_campaign_with_its_seed(ends: object) -> None:
    def run(seed: int) -> Report:
        if seed == 2:
            assert callable(ends)
            ends()
        return ran(seed)

    told: list[Report] = []
    with pytest.raises(RuntimeError, match="seed 2 ended"):
        campaign(iter(range(5)), told=told.append, run=run)
    assert [report.seed for report in told] == [0, 1]


def children() -> set[str]:
    """Child processes of this thread; the tests have some of their own."""
    return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())


def test_what_hears_of_a_report_may_end_the_campaign() -> None:
    def stop(report: Report) -> None:
        raise KeyboardInterrupt

    before = children()
    with pytest.raises(KeyboardInterrupt):
        campaign(iter(range(5)), told=stop, run=ran)
    assert children() <= before
