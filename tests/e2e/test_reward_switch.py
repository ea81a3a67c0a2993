"""A run whose reward is improved twice while it trains, a hostile function beside it: the version moves on,
each batch is of one, and no step is lost."""

from __future__ import annotations

import asyncio
import itertools
import json
import signal
from pathlib import Path

import pytest
from click.testing import CliRunner

from meshrl.cli.commands.reward import reward
from meshrl.sandbox.sandbox import no_bubblewrap

from ..mesh import Mesh, make_mesh

pytestmark = pytest.mark.slow

HEAD = "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"


def meshrl(mesh: Mesh, *arguments: str) -> str:
    """The output of `meshrl reward ...` for this mesh."""
    done = CliRunner().invoke(reward, ["--run-dir", str(mesh.run_dir), *arguments])
    assert done.exit_code == 0, (done.output, done.exception)
    return done.stdout


def submit(mesh: Mesh, factor: int, kind: str = "compute_score") -> str:
    """A version that pays `factor` per digit of the answer, of kind `process` where it stands; its hash."""
    path = mesh.directory / f"reward{factor}.py"
    paid = f"{factor} * c.isdigit()"
    returned = {
        "compute_score": f"sum({paid} for c in solution_str)",
        "process": f"[(n, {paid}) for n, c in enumerate(solution_str, 1)]",
    }
    path.write_text(HEAD + f"    return {returned[kind]}\n")
    tests = mesh.directory / "tests.jsonl"
    tests.write_text(json.dumps({"solution": "a1b2", "score": 2 * factor}) + "\n")
    said = meshrl(
        mesh, "submit", str(path), "--name", "reward", "--kind", kind, "--tests", str(tests)
    )
    assert "points to it (1 test passed)" in said
    return said.split()[0]


HOSTILE = """
import os

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    try:
        while os.fork():
            pass
    except BlockingIOError:
        pass
    while True:
        pass
"""


def submit_a_hostile_one(mesh: Mesh) -> str:
    """A version that forks and spins, which no name points to; its hash."""
    path = mesh.directory / "hostile.py"
    path.write_text(HOSTILE)
    limits = ("--limit", "deadline_s=0.5", "--limit", "processes=4")
    return meshrl(mesh, "submit", str(path), "--name", "reward", "--hold", *limits).split()[0]


def compare_with(mesh: Mesh, hostile: str) -> None:
    """Four samples go to it, beside the rows of the run; none gets a score."""
    samples = mesh.directory / "samples.jsonl"
    samples.write_text("".join(json.dumps({"solution": f"a{n}"}) + "\n" for n in range(4)))
    said = meshrl(mesh, "compare", "reward", hostile, "--samples", str(samples))
    assert "no score: 4 -> 0" in said


def test_a_reward_improved_twice_beside_a_hostile_one_switches_at_batch_boundaries(
    tmp_path: Path,
) -> None:
    mesh = make_mesh(tmp_path)
    long = (
        "trainer.total_training_steps=2000",
        "trainer.total_epochs=1000",
        "trainer.test_freq=-1",
        "trainer.val_before_train=false",
        "trainer.save_freq=-1",
        "reward.token_rewards=true",
        f"reward.sandbox={'weak' if no_bubblewrap() else 'strict'}",
    )
    with mesh.up(*long) as process:
        mesh.wait_for_step(process, 2)
        versions = [submit(mesh, 2)]
        compare_with(mesh, submit_a_hostile_one(mesh))
        versions.append(submit(mesh, 3, "process"))
        mesh.wait_for_step(process, len(mesh.steps()) + 3)
        assert f"scoring: {versions[1]}" in meshrl(mesh, "list")
        process.send_signal(signal.SIGINT)
        mesh.wait(process, code=130)
    assert [step["step"] for step in mesh.steps()] == list(range(1, len(mesh.steps()) + 1))
    hashes = [step["reward/hash"] for step in mesh.steps()]
    runs = [version for version, _ in itertools.groupby(hashes)]
    assert runs[1:] == versions  # never back to a version that was superseded
    audit = (mesh.run_dir / "rewards" / "audit.jsonl").read_text().splitlines()
    pointed = [json.loads(line)["hash"] for line in audit]
    assert [hash_ for hash_ in pointed if hash_ in versions] == versions
    ledger = asyncio.run(mesh.ledger())
    assert ledger.balanced and not ledger.filtered and not ledger.dead_lettered
