"""The documented foreign trainer, run as its page says and killed once."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from .client_scenes import queue_process

EXAMPLE = Path(__file__).parents[3] / "docs/examples/foreign_trainer.py"
STEPS = 40
ROWS = STEPS * 8 * 8


@pytest.mark.slow
def test_the_example_learns_and_survives_a_kill(tmp_path: Path) -> None:
    with queue_process(tmp_path / "queue") as address:
        command = [sys.executable, str(EXAMPLE), "--queue", address, "--folder", str(tmp_path)]
        command += ["--steps", str(STEPS)]
        with subprocess.Popen(command) as first:
            while not (tmp_path / "checkpoint.pt").exists():
                assert first.poll() is None, "the example ended early"
                time.sleep(0.02)
            first.kill()
        assert first.returncode == -signal.SIGKILL
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    # A prompt whose rows became too old during the restart is issued again, so more rows may be admitted.
    trained = re.search(r"(\d+) of \d+ rows trained, once each", done.stdout)
    assert trained is not None
    assert int(trained[1]) == ROWS
    reward = re.search(r"-> (\S+)", done.stdout)
    assert reward is not None
    assert float(reward[1]) > 0.8
