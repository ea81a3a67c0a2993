"""Cgroups of sandboxes: where they can be had and why not elsewhere, what they limit, and that none is left."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshrl.sandbox import limits
from meshrl.sandbox import sandbox as sandbox_module
from meshrl.sandbox.limits import Cgroup, Cgroups, Limits, NoCgroupError, delegated, settings
from meshrl.sandbox.sandbox import WeakSandbox


def gone(folder: Path) -> None:
    """Wait for processes that were killed to leave, and for the folder to be removable."""
    while folder.exists():
        limits._remove_tree(folder)
        time.sleep(0.01)


UNLIMITED = Limits(processes=None, memory_bytes=None)


def machine(folder: Path, *, path: str, controllers: str = "cpu memory pids") -> Path:
    """A /proc/self and a cgroup2 file system, in which this process is at `path`."""
    point, proc = folder / "cgroup2", folder / "proc"
    here = point / path.strip("/")
    here.mkdir(parents=True)
    proc.mkdir()
    (proc / "mountinfo").write_text(
        f"31 23 0:28 / /sys/fs/cgroup/pids rw - cgroup cgroup rw,pids\n32 31 0:38 / {point} rw - cgroup2 cgroup2 rw\n"
    )
    (proc / "cgroup").write_text(f"8:pids:/\n0::{path}\n")
    for each in {here, here.parent}:
        (each / "cgroup.controllers").write_text(controllers)
        (each / "cgroup.subtree_control").write_text("")
    if here != point:
        (here / "cgroup.type").write_text("domain")
    return proc


def test_a_process_in_the_root_may_make_cgroups_there(tmp_path: Path) -> None:
    assert delegated(machine(tmp_path, path="/")) == tmp_path / "cgroup2"


def test_a_unit_may_make_them_in_the_cgroup_that_it_was_given(tmp_path: Path) -> None:
    proc = machine(tmp_path, path="/system.slice/reward.service/service")
    unit = tmp_path / "cgroup2/system.slice/reward.service"
    try:
        os.setxattr(unit, "user.delegate", b"1")
    except OSError as error:
        pytest.skip(f"this file system has no extended attributes: {error}")
    assert delegated(proc) == unit


@pytest.mark.parametrize(
    ("path", "controllers", "why"),
    [
        ("/", "hugetlb", "lacks the controllers memory and pids"),
        ("/", "memory", "lacks the controllers pids"),
        ("/session", "memory pids", "Delegate=memory pids"),
    ],
)
def test_one_line_says_why_there_are_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, controllers: str, why: str
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    with pytest.raises(NoCgroupError, match=why):
        delegated(machine(tmp_path, path=path, controllers=controllers))


def test_a_machine_without_version_2_has_none(tmp_path: Path) -> None:
    proc = machine(tmp_path, path="/")
    (proc / "mountinfo").write_text("31 23 0:28 / /sys/fs/cgroup/pids rw - cgroup cgroup rw,pids\n")
    with pytest.raises(NoCgroupError, match="no file system of type cgroup2"):
        delegated(proc)


def test_the_limits_of_a_sandbox_are_those_of_its_processes_together() -> None:
    assert settings(Limits(memory_bytes=1000, processes=8, tmp_bytes=50)) == {
        "pids.max": "12",
        "memory.max": "2050",
        "memory.oom.group": "1",
    }
    assert settings(UNLIMITED) == {}


def test_a_sandbox_is_limited_before_it_starts(tmp_path: Path) -> None:
    (tmp_path / "cgroup.subtree_control").write_text("")
    made = Path(f"{limits.PREFIX}{os.getpid()}-{limits.started(os.getpid())}")
    files = ("pids.max", "memory.max", "memory.oom.group", "memory.swap.max", "cgroup.procs")
    (tmp_path / made / "0").mkdir(parents=True)
    (tmp_path / made / "cgroup.subtree_control").write_text("")
    for name in files:
        (tmp_path / made / "0" / name).write_text("")
    one = Cgroups(tmp_path).make(Limits(memory_bytes=1000, processes=8, tmp_bytes=50))
    done = subprocess.run(
        one.entered(["cat", *files]), cwd=one.path, capture_output=True, text=True
    )
    assert done.stdout == "12205010" + "0\n"
    assert (tmp_path / "cgroup.subtree_control").read_text()


# --- on this machine's own cgroup2, with or without controllers


@pytest.fixture
def root() -> Iterator[Path]:
    mounts = [line.split() for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    points = [Path(line[4]) for line in mounts if line[line.index("-") + 1] == "cgroup2"]
    if not points or not os.access(points[0], os.W_OK) or (points[0] / "cgroup.type").exists():
        pytest.skip("no cgroup2 file system whose root is writable")
    yield points[0]
    assert not list(points[0].glob(f"{limits.PREFIX}{os.getpid()}-*/*"))


def test_what_a_sandbox_leaves_ends_with_its_cgroup(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Cgroups(root, controllers=())
    monkeypatch.setattr(sandbox_module, "cgroups", lambda: made)
    launch = WeakSandbox(limits=UNLIMITED).launch("this")
    program = ["sh", "-c", "cat /proc/self/cgroup; echo started; setsid sleep 60 & wait"]
    sandbox = subprocess.Popen([*launch.argv[:4], *program], stdout=subprocess.PIPE, text=True)
    assert sandbox.stdout is not None
    lines = list(iter(sandbox.stdout.readline, "started\n"))
    assert f"0::/{made.folder.name}/0\n" in lines
    launch.discard()
    # Its end: everybody who could write there has ended.
    assert select.select([sandbox.stdout], [], [], 20)[0] and sandbox.stdout.read() == ""
    sandbox.wait()
    sandbox.stdout.close()
    gone(made.folder)


HOST = """
import subprocess, sys, time
from pathlib import Path
from meshrl.sandbox.limits import Cgroups
from meshrl.sandbox.limits import Limits
made = Cgroups(Path(sys.argv[1]), controllers=())
one = made.make(Limits(processes=None, memory_bytes=None))
subprocess.Popen(one.entered(["sh", "-c", "echo $$; exec sleep 60"]))
time.sleep(60)
"""


def test_the_next_service_removes_what_a_killed_one_has_left(root: Path) -> None:
    host = subprocess.Popen(
        [sys.executable, "-c", HOST, str(root)], stdout=subprocess.PIPE, text=True
    )
    assert host.stdout is not None
    sleeper = int(host.stdout.readline())
    [left] = root.glob(f"{limits.PREFIX}{host.pid}-*")
    host.send_signal(signal.SIGKILL)
    host.wait()
    end = os.pidfd_open(sleeper)
    here = Cgroups(root, controllers=()).folder
    assert select.select([end], [], [], 20)[0], "it sleeps on"
    os.close(end)
    host.stdout.close()
    gone(left)
    gone(here)


# --- with the controllers memory and pids, where this kernel gives them to version 2


@pytest.fixture
def limited() -> Iterator[Cgroups]:
    try:
        made = Cgroups(delegated())
    except (NoCgroupError, OSError) as error:
        pytest.skip(f"no cgroup v2 with limits: {error}")
    yield made
    gone(made.folder)


def run_in(one: Cgroup, source: str) -> subprocess.CompletedProcess[str]:
    """Python code as a sandbox's first process."""
    argv = one.entered([sys.executable, "-c", source])
    return subprocess.run(argv, capture_output=True, text=True)


TOGETHER = """
import os, time
children = []
for _ in range(4):
    if (pid := os.fork()) == 0:
        block = bytearray(40 << 20)
        block[::4096] = b"x" * len(block[::4096])
        time.sleep(60)
    children.append(pid)
for child in children:
    os.waitpid(child, 0)
"""


def test_processes_that_use_more_memory_together_than_their_sandbox_may_end_together(
    limited: Cgroups,
) -> None:
    one = limited.make(Limits(memory_bytes=32 << 20, processes=None, tmp_bytes=None))
    assert run_in(one, TOGETHER).returncode == -signal.SIGKILL
    limited.remove(one)


INODES = """
import os
for i in range(1_000_000):
    os.close(os.open(f"/dev/shm/meshrl-cgroup-{os.getpid()}-{i}", os.O_CREAT | os.O_WRONLY))
"""


def test_memory_that_no_limit_of_a_process_counts_is_the_sandboxes(limited: Cgroups) -> None:
    one = limited.make(Limits(memory_bytes=16 << 20, processes=None, tmp_bytes=None))
    try:
        assert run_in(one, INODES).returncode == -signal.SIGKILL
    finally:
        for each in Path("/dev/shm").glob("meshrl-cgroup-*"):
            each.unlink()
    limited.remove(one)


FORKS = """
import os, time
made = 0
try:
    while made < 100:
        if os.fork() == 0:
            time.sleep(60)
        made += 1
except BlockingIOError:
    print(made)
"""


def test_no_sandbox_starts_more_processes_than_it_may(limited: Cgroups) -> None:
    one = limited.make(Limits(memory_bytes=None, processes=8))
    argv = one.entered([sys.executable, "-c", FORKS])
    sandbox = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    assert sandbox.stdout is not None
    assert sandbox.stdout.readline() == f"{8 + limits.HELPERS - 1}\n"
    limited.remove(one)
    sandbox.wait()
    sandbox.stdout.close()
