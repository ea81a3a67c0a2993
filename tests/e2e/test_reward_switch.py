"""A run whose reward is improved twice while it trains: each batch is of one version, and the version moves on."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ..mesh import Mesh, make_mesh

HEAD = "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"


def meshrl(mesh: Mesh, *arguments: str) -> str:
    command = [
        sys.executable,
        "-m",
        "meshrl.services.cli",
        "reward",
        "--run-dir",
        str(mesh.run_dir),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, *arguments], capture_output=True, text=True, timeout=120, env=environment
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def submit(mesh: Mesh, factor: int) -> str:
    """A version that pays `factor` per digit of the answer; its hash."""
    path = mesh.directory / f"reward{factor}.py"
    path.write_text(HEAD + f"    return {factor} * sum(c.isdigit() for c in solution_str)\n")
    tests = mesh.directory / "tests.jsonl"
    tests.write_text(json.dumps({"solution": "a1b2", "score": 2 * factor}) + "\n")
    said = meshrl(mesh, "submit", str(path), "--name", "reward", "--tests", str(tests))
    assert "points to it (1 tests passed)" in said
    return said.split()[0]


@pytest.mark.slow
def test_a_reward_improved_twice_switches_at_batch_boundaries(tmp_path: Path) -> None:
    mesh = make_mesh(tmp_path, {"actor": {"use_kl_loss": False}})
    long = (
        "trainer.total_training_steps=2000",
        "trainer.total_epochs=1000",
        "trainer.test_freq=-1",
        "trainer.val_before_train=false",
        "trainer.save_freq=-1",
        "reward.sandbox=weak",
    )
    with mesh.up(*long) as process:
        mesh.wait_for_step(process, 2, 120)
        versions = [submit(mesh, 2)]
        mesh.wait_for_step(process, len(mesh.steps()) + 4, 120)
        versions.append(submit(mesh, 3))
        mesh.wait_for_step(process, len(mesh.steps()) + 4, 120)
        assert f"scoring: {versions[1]}" in meshrl(mesh, "list")
        tried = meshrl(mesh, "test", "reward", "--solution", "123", "--truth", "x")
        assert tried.startswith("9 ")
        compared = meshrl(mesh, "compare", "reward", versions[0])
        assert f"{versions[0]} -> {versions[1]}" in compared
        process.send_signal(signal.SIGINT)
        mesh.wait(process, 120, code=130)
    hashes = [step["reward/hash"] for step in mesh.steps()]
    runs = [version for version, _ in itertools.groupby(hashes)]
    assert runs[1:] == versions  # never back to a version that was superseded
    audit = (mesh.run_dir / "rewards" / "audit.jsonl").read_text().splitlines()
    assert [json.loads(line)["hash"] for line in audit] == versions
    ledger = asyncio.run(mesh.ledger())
    assert ledger.balanced and not ledger.filtered
