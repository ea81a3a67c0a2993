"""The lock file pins what pyproject.toml asks for, with hashes, and names no index; the wheel has no tests."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[3]
LOCKS = {
    ".ci/requirements.lock": ("torch", "rewards", "vllm", "dev"),
    "deploy/core.lock": ("rewards", "redis"),
    "deploy/cpu.lock": ("torch", "rewards", "vllm", "tools", "logging", "redis", "s3"),
    "deploy/cuda.lock": ("torch", "rewards", "vllm", "tools", "logging", "redis", "s3", "nccl"),
    "deploy/vllm.lock": ("torch", "vllm", "tools", "logging", "redis", "s3", "nccl"),
    "deploy/sglang.lock": ("torch", "sglang", "tools", "logging", "redis", "s3", "nccl"),
}
"""Extras in the lock files of CI and of the images."""
CUDA = ("deploy/cuda.lock", "deploy/vllm.lock", "deploy/sglang.lock")
"""Locks with torch for CUDA, as pip's own index has it."""


def pinned(lock: str) -> dict[str, str]:
    pins = re.findall(r"^([A-Za-z0-9._-]+)==([^\s;\\]+)", (ROOT / lock).read_text(), re.MULTILINE)
    return {canonicalize_name(name): version for name, version in pins}


@pytest.mark.parametrize("lock", LOCKS)
def test_every_requirement_is_pinned_to_a_version_that_fits(lock: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *(ROOT / ".ci" / "lock-build.txt").read_text().splitlines()]
    pins = pinned(lock)
    for extra in LOCKS[lock]:
        wanted += extras[extra]
    for line in wanted:
        if line.startswith("#") or line.startswith("torch>"):
            continue
        requirement = Requirement(line)
        name = canonicalize_name(requirement.name)
        assert name in pins, f"{line} is not in the lock: make lock"
        assert requirement.specifier.contains(pins[name]), f"{line}: {pins[name]}: make lock"


@pytest.mark.parametrize("lock", LOCKS)
def test_every_pin_has_a_hash_and_torch_comes_before_the_lock(lock: str) -> None:
    pins, text = pinned(lock), (ROOT / lock).read_text()
    entries = re.split(r"\n(?=\S)", text.strip())
    assert len(entries) == len(pins) > 40
    assert all("--hash=sha256:" in entry for entry in entries)
    brought = [name for name in pins if name.startswith(("nvidia-", "cuda-", "triton"))]
    assert ("torch" in pins) == bool(brought) == (lock in CUDA)
    assert "://" not in text
    assert "--index" not in text and "--extra-index" not in text


def test_images_hold_what_the_tests_ran_with() -> None:
    tested = pinned(".ci/requirements.lock")
    for lock in ("deploy/core.lock", "deploy/cpu.lock", "deploy/cuda.lock"):
        assert {n: v for n, v in pinned(lock).items() if tested.get(n, v) != v} == {}


@pytest.mark.parametrize("server", ["vllm", "sglang"])
def test_images_with_a_server_hold_the_one_that_the_tests_ran_with(server: str) -> None:
    text = (ROOT / "Makefile").read_text()
    (version,) = re.findall(rf"^{server.upper()}(?:_CPU)? := (\S+)$", text, re.MULTILINE)
    assert pinned(f"deploy/{server}.lock")[server] == version


def test_an_audit_that_cannot_be_made_ends_with_one_line_and_code_2(tmp_path: Path) -> None:
    audit = [sys.executable, ROOT / ".ci" / "audit.py", tmp_path / "no.lock"]
    done = subprocess.run(audit, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: the packages were not audited: ")


wheel = pytest.importorskip("hatchling.builders.wheel")
ROOMS = {"common", "proto", "transferqueue", "rollout", "rewardd", "trainer", "services", "recipes"}


def test_the_wheel_has_the_rooms_and_the_recipes_and_nothing_of_the_tests() -> None:
    files = list(wheel.WheelBuilder(str(ROOT)).recurse_included_files())
    assert {Path(file.path).relative_to(ROOT).parts[0] for file in files} == ROOMS
    names = {file.distribution_path for file in files}
    assert {name.split("/")[0] for name in names} == {"meshrl"}
    assert {"meshrl/testing/contract/queue_suite.py", "meshrl/planning/planner.py"} <= names
