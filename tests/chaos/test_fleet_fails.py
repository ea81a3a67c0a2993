"""A fleet that fails as a whole: the run ends by itself, in one line that names what failed and where."""

from __future__ import annotations

from pathlib import Path

import pytest

from ..mesh import Mesh, make_mesh

pytestmark = pytest.mark.slow


def error_of(mesh: Mesh) -> str:
    (line,) = [line for line in mesh.output.splitlines() if line.startswith("error: ")]
    return line


def test_engines_that_fail_every_request_end_the_run(tmp_path: Path) -> None:
    control = tmp_path / "control"
    control.write_text("fail")
    rollout = {
        "name": "echo",
        "workers": 2,
        "slots": 8,
        "engine": {"control": str(control)},
    }
    changes = {
        "rollout": rollout,
        "queue": {"max_attempts": 1000},
        "trainer": {"test_freq": -1},
        "data": {"val_files": []},
    }
    mesh = make_mesh(tmp_path, changes)
    with mesh.up() as process:
        mesh.wait(process, code=1)
    line = error_of(mesh)
    assert line.startswith("error: no rollout worker is left of 2: rollout-"), line
    assert "fails every request, the last one with: InfraError: the engine was told to fail" in line


def test_servers_that_nobody_can_reach_end_the_run(tmp_path: Path) -> None:
    engine = {"url": "http://127.0.0.1:9", "start_s": 1.0}
    mesh = make_mesh(tmp_path, {"rollout": {"name": "vllm", "engine": engine}})
    with mesh.up() as process:
        mesh.wait(process, code=2)
    line = error_of(mesh)
    assert "rollout-" in line and "no vLLM server answers at http://127.0.0.1:9" in line, line
