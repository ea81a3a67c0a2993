"""A run as an object: what its files tell, how it ends, and the notebook that uses it."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pyarrow as arrow
import pyarrow.parquet as parquet
import pytest

from meshrl.api import Run, RunStatus, open_run, run
from meshrl.contract.errors import ConfigError, MeshError, UserError
from meshrl.launcher.address_book import run_lock
from meshrl.launcher.run_directory import FINISHED_NAME
from meshrl.trainer.trajectories.files import FOLDER, file_of
from meshrl.trainer.trajectories.table import schema

from ...small_checkpoint import write_tokenizer, write_weights

ROOT = Path(__file__).parents[3]
NOTEBOOK = ROOT / "docs" / "examples" / "train.ipynb"
RECIPE = """
model: {path: model}
data: {train_files: [train.jsonl]}
reward: {functions: [{name: exact_match}]}
trainer: {total_training_steps: 2}
"""


@pytest.fixture(autouse=True)
def _in_a_directory_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    checkpoint(Path("model"))
    Path("train.jsonl").write_text('{"prompt": "2+3?", "answer": "5"}\n' * 32)
    Path("my.yaml").write_text(RECIPE)


def checkpoint(path: Path) -> None:
    """A checkpoint that passes a recipe's checks."""
    path.mkdir(parents=True)
    shape = {"architectures": ["Qwen3ForCausalLM"], "max_position_embeddings": 2048}
    (path / "config.json").write_text(json.dumps(shape | {"model_type": "qwen3"}))
    write_weights(path / "model.safetensors")
    write_tokenizer(path)


def leave_a_run(directory: Path, steps: int = 2) -> None:
    """Write the files of a finished run of `RECIPE`."""
    (directory / FOLDER).mkdir(parents=True)
    (directory / "checkpoints" / "step-2").mkdir(parents=True)
    lines = [
        {"step": step, "reward/mean": step / 2, "time/unix_s": 1000.0 + step, "batch/rows": 8}
        for step in range(steps)
    ]
    lines.append({"step": steps, "val/score/mean": 0.75, "time/unix_s": 1002.0})
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (directory / "metrics.jsonl").write_text(text + '{"step": 3, "rew')  # being written
    length = {"trainer.total_training_steps": steps, "trainer.total_epochs": 1}
    (directory / FINISHED_NAME).write_text(json.dumps({"step": steps, "length": length}))
    for step in range(steps):
        rows = [
            {"uid": f"r/{step}/{n}.0", "step": step, "reward": float(n), "prompt": "2+3?"}
            | {"response": str(n), "reward_components": [("thinks", 0.0)]}
            for n in range(2)
        ]
        table = arrow.Table.from_pylist(rows, schema())
        parquet.write_table(table, file_of(directory / FOLDER, "train", step))


def test_a_run_that_is_finished_is_read_and_not_started_again() -> None:
    leave_a_run(Path("runs/my"))
    found = run("my.yaml")
    assert found.wait() == RunStatus(
        state="finished", steps=2, reward=0.5, held_out_score=0.75, samples=16, seconds=2.0
    )
    assert [line["step"] for line in found.metrics()] == [0, 1, 2]
    assert [row["uid"] for row in found.rows()] == ["r/1/0.0", "r/1/1.0"]
    assert [row["uid"] for row in found.rows("all", order="best", limit=1)] == ["r/1/1.0"]
    assert [row["response"] for row in found.rows(0, where="reward < 0.5")] == ["0"]
    assert open_run("runs/my").status == found.status
    assert open_run("runs/my").stop().state == "finished"


def test_a_wrong_recipe_raises_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match=r"rollout\.n: got 0, want a positive integer"):
        run("my.yaml", {"rollout.n": 0})
    with pytest.raises(ConfigError, match="rollot"):
        run("my.yaml", ["rollot.n=2"])
    assert not Path("runs").exists()


def test_overrides_arrive_as_they_were_meant() -> None:
    leave_a_run(Path("elsewhere"))
    values = {
        "run.dir": Path("elsewhere"),
        "queue.max_staleness": math.inf,
        "actor.optim.lr": 1e-6,
        "rollout.stop": ["a: b", "#"],
    }
    assert run("my.yaml", values).directory == Path("elsewhere").absolute()


def test_what_is_trained_already_is_not_started_twice() -> None:
    Path("runs/my").mkdir(parents=True)
    with run_lock(Path("runs/my")), pytest.raises(UserError, match="is in use"):
        run("my.yaml")


def test_a_directory_without_a_run_is_refused() -> None:
    with pytest.raises(UserError, match="model: no run's directory"):
        open_run("model")


@pytest.mark.parametrize(
    ("code", "said", "kind"),
    [
        (2, "error: my.yaml:1: wrong\n", UserError),
        (1, "error: the disk is full\n", MeshError),
        (1, "", MeshError),
    ],
)
def test_a_run_that_failed_says_why(code: int, said: str, kind: type[MeshError]) -> None:
    Path("logs").mkdir()
    Path("logs/up.err").write_text("queue: ready\n" + said)
    ended = subprocess.Popen([sys.executable, "-Sc", f"raise SystemExit({code})"])
    expected = said.removeprefix("error: ").strip() or "meshrl up ended with code 1"
    with pytest.raises(kind, match=expected):
        Run(Path.cwd(), ended).wait()


def test_the_cells_of_the_notebook_run(monkeypatch: pytest.MonkeyPatch) -> None:
    for recipe in ("algorithms/dapo.yaml", "demo/recipe.yaml", "demo/reward.py"):
        Path("recipes", recipe).parent.mkdir(parents=True, exist_ok=True)
        Path("recipes", recipe).write_text((ROOT / "recipes" / recipe).read_text())
    checkpoint(Path("runs/demo/assets/model"))
    for name in ("train.jsonl", "held_out.jsonl"):
        Path("runs/demo/assets", name).write_text(Path("train.jsonl").read_text())
    leave_a_run(Path("runs/notebook"))
    note = {"step": 2, "length": {"trainer.total_training_steps": 40, "trainer.total_epochs": 1}}
    Path("runs/notebook", FINISHED_NAME).write_text(json.dumps(note))
    monkeypatch.setenv("MPLBACKEND", "Agg")
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    names: dict[str, object] = {}
    for cell in cells:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), str(NOTEBOOK), "exec"), names)
    assert names["thoughtless"]
