from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshrl.rewardd.sandbox import sandbox
from meshrl.rewardd.sandbox.limits import Limits
from meshrl.rewardd.sandbox.sandbox import NOBODY, WeakSandbox


@pytest.fixture
def folder() -> Iterator[Path]:
    """Not pytest's own: these are closed to others."""
    path = Path(tempfile.mkdtemp())
    yield path
    shutil.rmtree(path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize(("mode", "user"), [(0o755, NOBODY), (0o700, None)])
def test_a_weak_sandbox_of_root_runs_as_nobody_if_nobody_can_read_the_function(
    folder: Path, mode: int, user: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox, "python_paths", set)
    function = folder / "versions" / "1"
    function.mkdir(parents=True)
    folder.chmod(mode)
    launch = WeakSandbox(limits=Limits(), readable=(function,)).launch()
    launch.discard()
    assert launch.confinement["user"] == user
