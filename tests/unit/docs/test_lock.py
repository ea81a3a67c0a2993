"""The lock file pins what pyproject.toml asks for, with hashes, and names no index."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[3]
LOCK = (ROOT / ".ci" / "requirements.lock").read_text()
PINNED = {
    canonicalize_name(name): version
    for name, version in re.findall(r"^([A-Za-z0-9._-]+)==([^\s;\\]+)", LOCK, re.MULTILINE)
}


def test_every_requirement_of_the_environment_is_pinned_to_a_version_that_fits() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *(ROOT / ".ci" / "lock-build.txt").read_text().splitlines()]
    for extra in ("torch", "rewards", "vllm", "dev"):
        wanted += extras[extra]
    for line in wanted:
        if line.startswith("#") or line.startswith("torch>"):
            continue
        requirement = Requirement(line)
        name = canonicalize_name(requirement.name)
        assert name in PINNED, f"{line} is not in the lock: make lock"
        assert requirement.specifier.contains(PINNED[name]), f"{line}: {PINNED[name]}: make lock"


def test_every_pin_has_a_hash_and_torch_comes_before_the_lock() -> None:
    entries = re.split(r"\n(?=\S)", LOCK.strip())
    assert len(entries) == len(PINNED) > 100
    assert all("--hash=sha256:" in entry for entry in entries)
    assert "torch" not in PINNED
    assert not [name for name in PINNED if name.startswith(("nvidia-", "cuda-", "triton"))]
    assert "://" not in LOCK
    assert "index" not in LOCK


def test_an_audit_that_cannot_be_made_ends_with_one_line_and_code_2(tmp_path: Path) -> None:
    audit = [sys.executable, ROOT / ".ci" / "audit.py", tmp_path / "no.lock"]
    done = subprocess.run(audit, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: the packages were not audited: ")
