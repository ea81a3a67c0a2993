"""Stories of several machines, each in network namespaces: `python -m deploy.checks.machines` has the others."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from .machines import ROOT, missing

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(missing()), reason=missing())]


def test_a_trainer_of_two_machines_goes_on_when_one_is_killed(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "deploy.checks.machines", "ranks", "--folder", str(tmp_path)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["ledger"] == "balanced"
    # Both were started again, and nobody else.
    again = {name for name, starts in found["starts"].items() if starts > 1}
    assert again == {"train-0/trainer", "train-1/trainer"}
