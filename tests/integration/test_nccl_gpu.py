"""NCCL itself on a GPU, where there is one, and the same script on the stub, where there is none."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu" / "nccl_channels.py"


def run(library: str) -> dict[str, Any]:
    options = ["--mib", "5", "--buckets", "2", "--rounds", "1", "--deadline", "5"]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--library", library, *options],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


@pytest.mark.parametrize("library", ["stub", pytest.param("cupy", marks=pytest.mark.gpu)])
def test_bytes_are_exact_deadlines_hold_and_a_killed_rank_is_replaced(library: str) -> None:
    result = run(library)
    if "skipped" in result:
        pytest.skip(result["skipped"])
    assert result["exact"]
    assert "did not finish in" in result["deadline_s"]["said"]
    assert result["rebuilt_s"] > 0
