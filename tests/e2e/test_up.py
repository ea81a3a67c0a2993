"""`meshrl up` from recipe to export, every service a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import time
from pathlib import Path

import pyarrow.parquet as parquet
import pytest
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from meshrl.api import run
from meshrl.trainer.trajectories.files import FOLDER

from ..listening import descendants, reachable_sockets, unix_sockets
from ..mesh import PATIENCE_S, make_mesh
from ..run_directory import unnamed_files

pytestmark = pytest.mark.slow


def test_a_run_trains_evaluates_exports_and_balances(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Started as a user starts it: by fresh interpreters."""
    monkeypatch.setenv("TEST_FORKS", "0")
    mesh = make_mesh(tmp_path, reference=True)
    reachable: set[tuple[str, int]] = set()
    local: set[str] = set()
    with mesh.up() as process:
        while process.poll() is None:
            reachable |= reachable_sockets(process.pid)
            for each in descendants(process.pid):
                with contextlib.suppress(OSError):
                    local |= unix_sockets(each)
            time.sleep(0.2)
        mesh.wait(process)
    assert not reachable, "nothing listens beyond loopback unasked"
    assert not local, "payload has no way beside gRPC"
    assert not unnamed_files(mesh.run_dir), "docs/reference/run-directory.md names every file"
    assert [line["step"] for line in mesh.steps()] == [1, 2, 3, 4]
    assert [m["step"] for m in mesh.metrics() if "val/score/mean" in m] == [0, 2, 4]
    for line in mesh.steps():
        logged = parquet.read_table(
            mesh.run_dir / FOLDER / f"step-{line['step']}.parquet"
        ).to_pylist()
        assert len(logged) == 16 and all(row["prompt"].endswith("?") for row in logged)
        assert sum(row["reward"] for row in logged) / 16 == pytest.approx(line["reward/mean"])
        assert {row["worker"] for row in logged} <= {"rollout-0", "rollout-1"}
    ledger = asyncio.run(mesh.ledger())
    assert ledger.balanced and ledger.trained == 4 * 16
    held_out = asyncio.run(mesh.ledger("tiny.eval"))
    assert held_out.balanced and held_out.trained == 3 * 6
    model = AutoModelForCausalLM.from_pretrained(mesh.export)
    prompt = AutoTokenizer.from_pretrained(mesh.export)("a=1;b=a+2?", return_tensors="pt")
    answered = model.generate(**prompt, max_new_tokens=4, do_sample=False)
    assert answered.shape[1] > prompt["input_ids"].shape[1]


def test_on_policy_runs_are_equal_to_the_bit_also_in_turns_on_one_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        changes = {"queue": {"max_staleness": 0}, "rollout": {"on_update": "drain"}}
        mesh = make_mesh(tmp_path / name, changes, reference=True)
        if name == "first":
            mesh.run("trainer.test_freq=-1", "trainer.val_before_train=false")
        else:  # whoever starts it
            monkeypatch.setenv("OMP_NUM_THREADS", "1")
            changes = {"trainer.test_freq": -1, "trainer.val_before_train": False}
            with run(mesh.recipe, {**changes, "placement.colocate": "time_sliced"}) as it:
                assert it.status.state == "running"
                assert it.wait(PATIENCE_S).state == "finished"
            assert all(line["time_slices/held_s"] > 0 for line in mesh.steps()[1:])
            assert all(line["staleness/max"] == 0 for line in mesh.steps())
        weights.append(load_file(mesh.export / "model.safetensors"))
    before = load_file(tmp_path / "first" / "model" / "model.safetensors")
    assert weights[0].keys() == weights[1].keys()
    assert all(bool((weights[0][name] == weights[1][name]).all()) for name in weights[0])
    assert any(bool((weights[0][name] != before[name]).any()) for name in before)
