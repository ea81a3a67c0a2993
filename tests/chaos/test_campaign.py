"""Short campaigns with real processes: kills, pauses, a cut network, a full disk. `make chaos` runs long ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from .campaign.__main__ import NOT_PERMITTED
from .campaign.driver import MORE_STEPS

ROOT = Path(__file__).parents[2]
SEED = os.environ.get("CHAOS_SEED", "1")


def campaign(*options: str, code: int = 0) -> dict[str, Any]:
    """The report of one campaign, run as `make chaos` does."""
    command = [sys.executable, "-m", "tests.chaos.campaign", "--seed", SEED, *options]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    print(ended.stdout, ended.stderr)
    report: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    if ended.returncode == NOT_PERMITTED:
        pytest.skip(report["skipped"])
    assert ended.returncode == code, ended.stdout + ended.stderr
    return report


def assert_exact(report: dict[str, Any]) -> None:
    assert (report["lost"], report["duplicated"]) == (0, 0)
    assert (report["ledger"], report["history"]) == ("exact", "legal")
    assert report["trained"] > MORE_STEPS


def test_killed_and_stopped_processes_and_lost_answers_cost_no_row_and_repeat_none() -> None:
    report = campaign("--kills", "10", "--pauses", "2", "--lost-answers", "0.03")
    assert_exact(report)
    assert report["kills"] == 10 and report["lost_answers"]


def test_a_redis_that_is_killed_with_its_queue_costs_no_row() -> None:
    assert_exact(campaign("--store", "redis", "--kills", "10"))


def test_a_network_that_swallows_everything_for_a_while_costs_no_row() -> None:
    """For longer than leases last, and than gRPC believes in a peer that acknowledges nothing."""
    report = campaign("--cuts", "1", "--cut-s", "14")
    assert_exact(report)
    assert report["outages"], "nobody noticed the cut"
    assert report["kills"] == 0, "the same processes continued"


def test_a_full_disk_under_the_queue_is_waited_for() -> None:
    small = ["--set", "reserve_bytes=4194304"]
    report = campaign("--fills", "2", *small)
    assert_exact(report)
    assert report["refusals"], "no call was refused because the disk was full"


def test_a_bug_in_the_queue_process_is_found_and_ends_with_1() -> None:
    report = campaign("--kills", "1", "--bug", "alters-content", code=1)
    assert report["ok"] is False
    assert "fetched are not those written" in report["history"]["content"][0]
