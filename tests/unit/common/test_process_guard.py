"""Real kills: whatever dies, and however, nothing that it started is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from meshrl.common import process_guard

from ...waiting import runs

FAMILY = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
stray = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print(stray.pid, flush=True)
time.sleep(600)
"""
"""A command that does not heed SIGTERM, with a child that has left its process group."""
HEEDS = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
print(1, flush=True)
time.sleep(600)
"""

PARENTS = {
    "a command with a log": """
log = pathlib.Path("log")
given = process_guard.guarded_command([sys.executable, "-c", FAMILY], grace_s=0, log=log)
child = subprocess.Popen(given, stdout=log.open("wb"), start_new_session=True)
while not (said := log.read_bytes()).endswith(b"\\n"): time.sleep(0.01)
""",
    "a command that speaks in lines": """
given = process_guard.guarded_command([sys.executable, "-c", FAMILY], grace_s=0, line_bytes=100)
child = subprocess.Popen(given, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
said = child.stdout.readline()
""",
    "a process of ours, and a listed group": """
ours = "import os, sys; from meshrl.common import process_guard; process_guard.die_with_supervisor();" + FAMILY
child = subprocess.Popen([sys.executable, "-c", ours.replace("start_new_session=True", "")], stdout=subprocess.PIPE,
    env={**os.environ, process_guard.PARENT_VARIABLE: str(os.getpid())}, start_new_session=True)
said = child.stdout.readline()
beside = subprocess.Popen(process_guard.watchdog_command(), stdin=subprocess.PIPE)
beside.stdin.write(b"+%d\\n" % child.pid)
beside.stdin.flush()
""",
}
BEGIN = (
    "import os, pathlib, subprocess, sys, time\nfrom meshrl.common import process_guard\n"
    f"{FAMILY=}\n"
)
END = "print(child.pid, said.decode().strip(), flush=True)\ntime.sleep(600)\n"


def wait_for_end(*pids: int) -> None:
    """Wait for processes that are no children; the suite's own timeout is the deadline."""
    while any(map(runs, pids)):
        time.sleep(0.01)


@contextmanager
def parent(program: str, path: Path) -> Iterator[tuple[subprocess.Popen[str], int, int]]:
    """A running parent, the pid of what it started, and that of the last child in the line."""
    command = [sys.executable, "-c", BEGIN + program + END]
    with subprocess.Popen(command, cwd=path, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        child, stray = map(int, process.stdout.readline().split())
        try:
            assert runs(child) and runs(stray)
            yield process, child, stray
        finally:
            process.kill()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("program", PARENTS.values(), ids=PARENTS)
def test_no_process_outlives_its_killed_parent(program: str, tmp_path: Path) -> None:
    with parent(program, tmp_path) as (process, child, stray):
        process.kill()
        wait_for_end(child, stray)


@contextmanager
def guarded(program: str, log: Path, grace_s: float = 0) -> Iterator[subprocess.Popen[bytes]]:
    command = process_guard.guarded_command(
        [sys.executable, "-c", program], grace_s=grace_s, log=log
    )
    with (
        log.open("wb") as stdout,
        subprocess.Popen(command, stdout=stdout, start_new_session=True) as process,
    ):
        try:
            yield process
        finally:
            process.kill()


def said(log: Path) -> int:
    while not (text := log.read_text()).endswith("\n"):
        time.sleep(0.01)
    return int(text)


def test_sigterm_ends_a_command_that_ignores_it_and_what_left_its_group(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with guarded(FAMILY, log) as guard:
        stray = said(log)
        guard.terminate()
        assert guard.wait() == -signal.SIGKILL
        wait_for_end(stray)


def test_a_command_may_end_by_itself_after_sigterm(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with guarded(HEEDS, log, grace_s=600) as guard:
        said(log)
        guard.terminate()
        assert guard.wait() == 7


def test_the_end_of_a_command_is_that_of_what_it_started(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with guarded(FAMILY.replace("time.sleep(600)\n", "sys.exit(3)\n"), log) as guard:
        assert guard.wait() == 3
        wait_for_end(said(log))


def test_a_command_dies_with_its_killed_guard(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with guarded("import os, time; print(os.getpid(), flush=True); time.sleep(600)", log) as guard:
        child = said(log)
        guard.kill()
        wait_for_end(child)


@pytest.mark.parametrize(
    "call", ["process_guard.die_with_parent(1 << 22)", "process_guard.die_with_supervisor()"]
)
def test_a_process_whose_parent_is_dead_already_ends(call: str) -> None:
    program = f"from meshrl.common import process_guard\n{call}\nraise SystemExit(0)"
    environment = {**os.environ, process_guard.PARENT_VARIABLE: str(1 << 22)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, check=False)
    assert done.returncode == process_guard.KILLED


def test_a_long_log_is_moved_aside_and_no_line_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_guard, "LOG_BYTES", 1000)
    path = tmp_path / "server.log"
    printed, printing = os.pipe()
    text = "".join(f"line {number}\n" for number in range(150))
    for at in range(0, len(text), 100):
        os.write(printing, text[at : at + 100].encode())
    os.close(printing)
    monkeypatch.setattr(process_guard, "READ_BYTES", 100)
    process_guard.copy_to_log(printed, os.open(path, os.O_WRONLY | os.O_CREAT), path)
    os.close(printed)
    assert (tmp_path / "server.log.1").read_text() + path.read_text() == text
