"""A start that is refused trains nothing and writes nothing, and the run continues as it was."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from meshrl.rpc.exit_codes import Exit

from ..mesh import Mesh, make_mesh

pytestmark = pytest.mark.slow


def files(mesh: Mesh) -> dict[str, bytes]:
    """Everything in the run's directory but the number of the process that looked last."""
    return {
        str(path.relative_to(mesh.run_dir)): path.read_bytes()
        for path in mesh.run_dir.rglob("*")
        if path.is_file() and path.name != "up.lock"
    }


def errors(mesh: Mesh, *overrides: str) -> list[str]:
    """Error lines of a start that is refused."""
    before = len(mesh.output)
    with mesh.up(*overrides) as process:
        mesh.wait(process, code=Exit.USER_ERROR)
    return [line for line in mesh.output[before:].splitlines() if line.startswith("error: ")]


def test_a_refused_start_leaves_a_run_byte_for_byte(tmp_path: Path) -> None:
    changes = {
        "data": {"val_files": []},
        "trainer": {"total_training_steps": 100_000, "save_freq": 2, "test_freq": -1},
    }
    mesh = make_mesh(tmp_path, changes)
    with mesh.up() as process:
        mesh.wait_for_step(process, 3)
        process.send_signal(signal.SIGINT)
        mesh.wait(process, code=128 + signal.SIGINT)
    done, before = len(mesh.steps()), files(mesh)

    train = Path(tmp_path, "train.jsonl")
    first, _, others = train.read_text().partition("\n")
    train.write_text(json.dumps({**json.loads(first), "prompt": "a=2;b=a+2?"}) + "\n" + others)
    (line,) = errors(mesh, "actor.optim.lr=0.1")
    assert line.startswith(f"error: data.train_files: {train} is not as it was"), line
    assert files(mesh) == before
    with mesh.serve("trainer", str(mesh.recipe), "--queue", "127.0.0.1:9") as trainer:
        assert trainer.wait(400) == Exit.USER_ERROR
    assert "train.jsonl is not as it was" in (tmp_path / "serve.log").read_text()
    assert files(mesh) == before

    mesh.run(f"trainer.total_training_steps={done + 2}", "--accept-changes")
    assert "the run began with" in mesh.output and "continues from their beginning" in mesh.output
    assert [step["step"] for step in mesh.steps()] == list(range(1, done + 3))
