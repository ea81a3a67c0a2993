"""kill -9 of a process that trains models for callers: no step is lost or repeated, no answer changes."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

from meshrl.trainer.model.policy import random_hf
from tests.unit.trainer import tiny

KILLS = 6


def life(folder: Path, model: Path, told: dict[str, str], kill_after: int | None) -> bool:
    """One process, killed when it has told so many answers; whether it came to its end."""
    command = [sys.executable, "-m", "tests.chaos.hosted_process", str(folder), str(model)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for count, line in enumerate(process.stdout):
            *request, answer = line.split()
            if request:
                assert told.setdefault(" ".join(request), answer) == answer, request
            if kill_after is not None and count >= kill_after:
                process.kill()
                break
    return process.returncode == 0


def files(folder: Path) -> dict[str, bytes]:
    found = sorted((folder / "checkpoints").rglob("*"))
    return {str(p.relative_to(folder)): p.read_bytes() for p in found if p.is_file()}


def test_kills_of_a_training_process_lose_and_repeat_nothing(tmp_path: Path) -> None:
    model = tmp_path / "model"
    random_hf(tiny.config(), seed=0).save_pretrained(model)
    wanted: dict[str, str] = {}
    assert life(tmp_path / "whole", model, wanted, None)
    told: dict[str, str] = {}
    draw = random.Random(0)
    for _ in range(KILLS):
        life(tmp_path / "killed", model, told, len(told) + draw.randrange(len(wanted) // KILLS))
    assert life(tmp_path / "killed", model, told, None)
    assert told == wanted
    assert files(tmp_path / "killed") == files(tmp_path / "whole")
