"""`meshrl slurm` on a real Slurm: three nodes of this machine, the trainer on two of them.

A requeue in mid-run, by the signal that says that the time limit is near, and a drain by scancel.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from meshrl.launcher.address_book import free_port
from tests.mesh import PATIENCE_S, Mesh, make_mesh

from . import slurm_cluster

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(slurm_cluster.missing()), reason=slurm_cluster.missing()),
]


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # Short: the path of a socket in it may have 108 characters.
    folder = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
    command = [sys.executable, slurm_cluster.__file__, str(folder), str(free_port("127.0.0.1"))]
    with (tmp_path / "cluster.log").open("wb") as log:
        running = subprocess.Popen(
            ["unshare", "--mount", *command],
            **{"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": log},
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
    try:
        assert running.stdout is not None
        assert running.stdout.readline() == b"ready\n", (tmp_path / "cluster.log").read_text()
        monkeypatch.setenv("SLURM_CONF", str(folder / "slurm.conf"))
        yield
    finally:
        running.communicate(b"", timeout=60)
        shutil.rmtree(folder, ignore_errors=True)


def told(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def submit(mesh: Mesh, *, program: str = "") -> str:
    """Write and submit the script for three nodes; the job's number. `program`: instead of `meshrl up`."""
    words = ["slurm", str(mesh.recipe), "trainer.total_training_steps=1000", "--nodes", "3"]
    text = told(sys.executable, "-m", "meshrl.cli", *words)
    if program:
        text, found = re.subn(r"\n\S*meshrl up ", f"\n{program} ", text)
        assert found == 1, text
    script = mesh.directory / "job.sbatch"
    script.write_text(text)
    output = f"--output={mesh.directory / 'up.log'}"
    (job,) = re.findall(r"\d+", told("sbatch", f"--chdir={mesh.directory}", output, str(script)))
    return job


def wait_until(mesh: Mesh, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, mesh.output[-6000:]
        time.sleep(0.3)


def state(job: str) -> str:
    (found,) = re.findall(r"JobState=(\w+)", told("scontrol", "show", "job", job))
    return found


def interrupt(mesh: Mesh, number: int, *command: str) -> None:
    """After two more steps say this, and wait for the stop of that number."""
    wanted = len(mesh.steps()) + 2
    wait_until(mesh, lambda: len(mesh.steps()) >= wanted)
    told(*command)
    wait_until(mesh, lambda: mesh.output.count("stopped by SIGTERM") == number)


@pytest.mark.parametrize(("program", "ends"), [("true", "COMPLETED"), ("false", "FAILED")])
def test_a_job_ends_as_its_up_does(tmp_path: Path, cluster: None, program: str, ends: str) -> None:
    job = submit(make_mesh(tmp_path), program=program)
    while state(job) in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING"):
        time.sleep(0.1)
    assert state(job) == ends


async def test_a_job_is_requeued_goes_on_and_drains(tmp_path: Path, cluster: None) -> None:
    trainer = {"save_freq": 1000, "nnodes": 2}
    mesh = make_mesh(tmp_path, {"rollout": {"workers": 2}, "trainer": trainer})
    job = submit(mesh)
    # What the script asks for before its time limit.
    interrupt(mesh, 1, "scancel", "--batch", "--signal=USR1", job)
    interrupt(mesh, 2, "scancel", job)
    wait_until(mesh, lambda: state(job) == "CANCELLED")
    assert "did not drain" not in mesh.output and "killing it" not in mesh.output
    # No step was trained twice: the stop saved, and the next start continued from there.
    assert [line["step"] for line in mesh.steps()] == list(range(1, len(mesh.steps()) + 1))
    assert (await mesh.ledger()).balanced
