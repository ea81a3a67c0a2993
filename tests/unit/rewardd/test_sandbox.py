from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshrl.contract.errors import ConfigError
from meshrl.sandbox import sandbox, seccomp
from meshrl.sandbox.limits import Limits
from meshrl.sandbox.sandbox import NOBODY, Isolation, open_sandbox


@pytest.fixture
def folder() -> Iterator[Path]:
    """Not pytest's own: these are closed to others."""
    path = Path(tempfile.mkdtemp())
    yield path
    shutil.rmtree(path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_weak_sandbox_of_root_runs_as_nobody(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox, "python_paths", set)
    folder.chmod(0o755)
    launch = open_sandbox(Isolation.WEAK, Limits(), readable=(folder,)).launch("this")
    launch.discard()
    assert launch.confinement["user"] == NOBODY


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_weak_sandbox_that_would_run_as_root_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox, "python_paths", set)
    function = folder / "versions" / "1"
    function.mkdir(parents=True)
    folder.chmod(0o700)
    with pytest.raises(ConfigError, match=f"would run functions as root: .* cannot read {folder};"):
        open_sandbox(Isolation.WEAK, Limits(), readable=(function,))


def test_the_filter_knows_both_machines_and_no_other() -> None:
    assert seccomp.program("x86_64", alone_pid=1, creates_files=False)
    assert seccomp.program("aarch64", alone_pid=1, creates_files=False)
    assert seccomp.program("riscv64") is None


def test_a_filter_without_landlock_lets_a_program_read_files_and_make_none(folder: Path) -> None:
    if not seccomp.available():
        pytest.skip("this kernel has no system call filters")
    code = (
        "import os, platform, pathlib\n"
        "from meshrl.sandbox import seccomp\n"
        "seccomp.install(seccomp.program(platform.machine(), alone_pid=os.getpid(), creates_files=False))\n"
        f"folder = pathlib.Path({str(folder)!r})\n"
        "assert list(folder.iterdir()) == []\n"
        "for make in (lambda p: p.write_text('x'), pathlib.Path.mkdir, lambda p: p.symlink_to('y')):\n"
        "    try:\n"
        "        make(folder / 'x')\n"
        "        raise SystemExit('made it')\n"
        "    except PermissionError:\n"
        "        pass\n"
    )
    subprocess.run([sys.executable, "-P", "-c", code], check=True)
