"""A run directory made by 0.1 (commit 84f5608) is listed, read, exported and resumed: `fixtures/run-0.1.tar.gz`.

So is one of a mesh that was killed at commit 9121209e: `fixtures/frozen/run.tar.xz`.

Its recipe names keys that later versions may drop, so each of them must be dropped in words and never end the run.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ..frozen_queue import unpacked

pytestmark = pytest.mark.slow

ARCHIVE = Path(__file__).parents[1] / "fixtures" / "run-0.1.tar.gz"
STEPS_DONE, STEPS = 5, 6


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.unpack_archive(ARCHIVE, tmp_path)
    return tmp_path / "old-run"


def meshrl(folder: Path, *words: str) -> str:
    """Run a command, which must succeed, and return its output."""
    command = [sys.executable, "-m", "meshrl.cli", *words]
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, f"{' '.join(words)}: {done.stdout}{done.stderr}"
    return done.stdout


def test_a_run_of_0_1_is_listed_and_read(folder: Path) -> None:
    ledger = json.loads(meshrl(folder, "ledger", "--run-dir", "run", "--json"))["tiny"]
    assert ledger["balanced"]
    assert "no row was given up" in meshrl(folder, "dead-letters", "--run-dir", "run")
    assert "no problems" in meshrl(folder, "queue", "verify", "run/queue")
    assert "is good" in meshrl(folder, "config", "check", "run/recipe.yaml")


def test_each_key_of_a_recipe_of_0_1_that_is_gone_is_named_once(folder: Path) -> None:
    command = [sys.executable, "-m", "meshrl.cli", "config", "check", "run/recipe.yaml"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    lines = done.stderr.splitlines()
    changed = [line.split()[1].partition("=")[0] for line in lines if "is no longer" in line]
    assert changed == ["queue.shared_memory_bytes", "queue.durability"]
    (same,) = [line for line in lines if "are no longer keys; this changes nothing" in line]
    assert re.search(r": \S+ and \d+ others are", same)


def test_a_run_of_0_1_is_exported(folder: Path) -> None:
    meshrl(folder, "export", "exported", "--run-dir", "run")
    assert (folder / "exported" / "model.safetensors").exists()


def test_a_run_of_0_1_is_resumed_and_ends(folder: Path) -> None:
    before = len((folder / "run" / "metrics.jsonl").read_text().splitlines())
    output = meshrl(folder, "up", "recipe.yaml", "--plain")
    assert f"{STEPS} of {STEPS}" in output
    assert "(balanced)" in output
    lines = [
        json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    trained = [line["step"] for line in lines[before:] if "reward/mean" in line]
    assert trained == [STEPS_DONE + 1], "only the step that was missing is trained"
    assert (folder / "run" / "export" / "model.safetensors").exists()


def test_a_run_that_was_killed_before_much_was_cut_is_listed_resumed_and_ends(
    tmp_path: Path,
) -> None:
    folder = unpacked("run", tmp_path)
    ledger = json.loads(meshrl(folder, "ledger", "--run-dir", "run", "--json"))["tiny"]
    assert ledger["balanced"]
    assert "no problems" in meshrl(folder, "queue", "verify", "run/queue")
    output = meshrl(folder, "up", "recipe.yaml", "--plain")
    assert f"{STEPS} of {STEPS}" in output
    assert "(balanced)" in output
    lines = [
        json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    trained = [line["step"] for line in lines if "reward/mean" in line]
    assert trained == list(range(1, STEPS + 1)), "those since the checkpoint are trained anew"
