"""Services as forks of a preloader, against real processes. The preloaders here import next to nothing."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from meshrl.common.device_lease import DeviceShare
from meshrl.common.python_process import PYTHON
from meshrl.launcher.preloader import LIGHT, TORCH
from meshrl.launcher.preloading import ForkedProcess, Preloading, preloading
from meshrl.launcher.processes import ServiceProcess
from meshrl.launcher.service import Service
from meshrl.launcher.supervisor import Supervisor

from ...waiting import runs, until
from .test_up_supervisor import WORKS, Log, running

ROOT = Path(__file__).parents[3]
NOTHING: Any = {"light": ["json"], "torch": ["random", "numpy.random"]}

TELLS = """
import json, os, random, sys, time
import numpy.random
facts = {
    "arguments": sys.argv[1:], "name": __name__, "main": sys.modules["__main__"].__file__,
    "parent": os.getppid(), "leads": os.getsid(0) == os.getpgid(0) == os.getpid(),
    "stdin": sys.stdin.read(), "path": sys.path, "flags": str(sys.flags), "variable": os.environ.get("MESHRL_TOLD"),
    "draws": [random.random(), numpy.random.random()],
    "descriptors": sorted(map(int, os.listdir("/proc/self/fd")))[:-1],
    "shown": open("/proc/self/cmdline").read().rstrip(chr(0)).split(chr(0)),
}
print(json.dumps(facts), flush=True)
print("and this goes to stderr", file=sys.stderr)
sys.exit(int(sys.argv[1]))
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on the path with modules that a service can run."""
    (tmp_path / "tells.py").write_text(TELLS)
    (tmp_path / "works.py").write_text(WORKS)
    (tmp_path / "sleeps.py").write_text("import time; time.sleep(600)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


@contextlib.contextmanager
def preloaded(modules: Any = NOTHING) -> Iterator[Preloading]:
    """Not a fixture: pytest changes the environment between the set-up of a test and its call."""
    with preloading(True, modules) as started:
        assert started is not None
        yield started


def service(module: str, *arguments: str, **rules: Any) -> Service:
    return Service(
        name=module,
        argv=(*PYTHON, module, *arguments),
        preload="torch",
        **rules,
    )


async def end(process: ServiceProcess) -> int:
    return await asyncio.shield(process.done)


def is_fork(process: ServiceProcess) -> bool:
    return isinstance(process._process, ForkedProcess)


def preloader_of(pid: int) -> int:
    """The process id of the light preloader; the other one is its child."""
    for path in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        with contextlib.suppress(OSError):
            if "meshrl.launcher.preloader\0light" in Path(f"/proc/{path}/cmdline").read_text():
                return int(path)
    raise AssertionError("no preloader")


async def test_a_fork_is_like_a_process_that_was_executed(folder: Path) -> None:
    with preloaded() as preloaders:
        found = []
        for started_by in (preloaders, preloaders, None):
            log = Log()
            asked = service("tells", "3", "four", env={"MESHRL_TOLD": "yes"})
            process = await ServiceProcess.start(asked, log, started_by)
            assert is_fork(process) == (started_by is not None)
            assert await end(process) == 3
            (first, second) = log.of("tells")
            assert second == "and this goes to stderr"
            found.append(json.loads(first))
        forked, again, executed = found
        assert not {*forked["draws"]} & {*again["draws"]}
        for facts in found:
            del facts["draws"]
        assert forked == again == executed
        assert executed["parent"] == os.getpid()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
async def test_a_fork_that_is_killed_ends_with_the_signal(
    folder: Path, number: signal.Signals
) -> None:
    with preloaded() as preloaders:
        process = await ServiceProcess.start(service("sleeps"), Log(), preloaders)
        assert is_fork(process)
        process.signal(number)
        assert await end(process) == -number
        assert not runs(process.pid)


async def test_killing_the_preloaders_kills_no_service_and_the_next_start_does_without(
    folder: Path,
) -> None:
    with preloaded() as preloaders:
        log = Log()
        supervisor = Supervisor([service("works")], log, preloading=preloaders)
        state = supervisor.states["works"]
        async with running(supervisor):
            await until(lambda: state.phase == "ready")
            first = state.pid
            os.kill(preloader_of(os.getpid()), signal.SIGKILL)
            await until(lambda: not preloaders_alive())
            assert runs(first)
            os.kill(first, signal.SIGKILL)
            await until(lambda: state.pid != first and state.phase == "ready")
            os.kill(state.pid, signal.SIGKILL)
            await until(lambda: state.restarts == 2 and state.phase == "ready")
        lines = [line for line in log.of("up") if "preloader" in line]
        assert lines == ["services start without the preloader torch: it has ended"]
        assert "works was killed by SIGKILL; starting it again in 0.4 s" in log.of("up")


def preloaders_alive() -> bool:
    try:
        return runs(preloader_of(os.getpid()))
    except AssertionError:
        return False


async def test_a_preloader_whose_imports_fail_is_done_without(folder: Path) -> None:
    log = Log()
    with preloaded({"light": ["json"], "torch": ["no_such_module"]}) as preloaders:
        process = await ServiceProcess.start(service("tells", "0"), log, preloaders)
        assert not is_fork(process)
        assert await end(process) == 0
    (line,) = log.of("up")
    assert "No module named 'no_such_module'" in line


async def test_pyarrow_starts_no_thread_that_would_forbid_a_fork(folder: Path) -> None:
    with preloaded({"light": ["json"], "torch": ["pyarrow"]}) as preloaders:
        process = await ServiceProcess.start(service("tells", "0"), Log(), preloaders)
        assert is_fork(process)
        assert await end(process) == 0


async def test_threads_of_the_imports_forbid_a_fork(folder: Path) -> None:
    (folder / "threads.py").write_text(
        "import threading, time\n"
        "threading.Thread(target=time.sleep, args=(600,), name='pool', daemon=True).start()"
    )
    log = Log()
    with preloaded({"light": ["json"], "torch": ["threads"]}) as preloaders:
        process = await ServiceProcess.start(service("tells", "0"), log, preloaders)
        assert not is_fork(process)
        assert await end(process) == 0
    (line,) = log.of("up")
    assert "started 1 thread (pool), which a fork would not have" in line


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "PYTORCH_ALLOC_CONF", "LD_PRELOAD"])
async def test_a_service_with_another_environment_is_executed(folder: Path, name: str) -> None:
    with preloaded() as preloaders:
        log = Log()
        process = await ServiceProcess.start(service("tells", "0", env={name: ""}), log, preloaders)
        assert not is_fork(process)
        assert await end(process) == 0
        assert log.of("up") == [
            f"services start without the preloader torch: the service has another {name}"
        ]


async def test_a_service_with_gpus_of_its_own_is_forked_and_sees_them(folder: Path) -> None:
    share = DeviceShare(devices=("2", "3"), ports=range(10_000, 10_064)).environment
    (folder / "sees.py").write_text(
        "import os; from meshrl.common.device_lease import DeviceShare\n"
        f"print(DeviceShare.of().environment == {dict(share)!r})"
    )
    with preloaded() as preloaders:
        log = Log()
        process = await ServiceProcess.start(service("sees", env=share), log, preloaders)
        assert is_fork(process)
        assert (await end(process), log.of("sees")) == (0, ["True"])


@pytest.mark.parametrize("busy", ["light", "torch"])
async def test_neither_preloader_waits_for_the_imports_of_the_other(
    folder: Path, busy: str
) -> None:
    (folder / "endless.py").write_text("import time; time.sleep(600)")
    modules = {"light": ["json", "random"], "torch": ["random"]}
    modules[busy].append("endless")
    kind: Any = "torch" if busy == "light" else "light"
    with preloaded(modules) as preloaders:
        asked = replace(service("tells", "0"), preload=kind)
        process = await ServiceProcess.start(asked, Log(), preloaders)
        assert is_fork(process)
        assert await end(process) == 0


async def test_ctrl_c_while_the_imports_run_ends_the_run_at_once(folder: Path) -> None:
    (folder / "endless.py").write_text("import time; time.sleep(600)")
    log = Log()
    with preloaded({"light": ["json"], "torch": ["endless"]}) as preloaders:
        supervisor = Supervisor([service("works")], log, preloading=preloaders)
        async with asyncio.timeout(60):
            running_it = asyncio.create_task(supervisor.run())
            await until(lambda: supervisor.states["works"].phase == "starting")
            supervisor.stop("stopped by Ctrl-C", 130)
            verdict = await running_it
    assert (verdict.code, supervisor.states["works"].pid) == (130, 0)


async def test_nothing_is_started_where_it_is_not_wanted() -> None:
    with preloading(False) as preloaders:
        assert preloaders is None


@pytest.mark.parametrize("modules", [LIGHT, (LIGHT[0], *TORCH)])
def test_what_is_preloaded_starts_no_thread_and_no_cuda(modules: tuple[str, ...]) -> None:
    asks_cuda = (
        "import torch\n"
        "def ask(*_): raise AssertionError('an import asks for GPUs: CUDA then starts before the fork')\n"
        "torch.cuda.is_available = torch.cuda.device_count = torch.cuda._lazy_init = ask\n"
    )
    source = (
        "import importlib, os, sys\n"
        f"{'' if modules == LIGHT else asks_cuda}"
        f"for module in {modules!r}: importlib.import_module(module)\n"
        "torch = sys.modules.get('torch')\n"
        "print(len(os.listdir('/proc/self/task')), torch is None or not torch.cuda.is_initialized(),"
        " torch is None)"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    found = subprocess.run(
        [sys.executable, "-c", source], env=environment, capture_output=True, text=True, check=True
    )
    assert found.stdout.split() == ["1", "True", str(modules == LIGHT)]


ENDED_AT_ONCE = """
import os, subprocess, time
from meshrl.launcher.preloading import preloading
from tests import forks

own = os.setsid
os.setsid = lambda: (time.sleep(0.5), own())  # a fork that comes late to its session
subprocess.Popen._execute_child = forks._fork_preloader
with preloading(True, {"light": ["json"], "torch": ["json"]}) as started:
    assert started is not None
"""


def test_preloaders_that_tests_fork_end_with_an_up_that_ends_at_once() -> None:
    """`up` kills their process group: it must be theirs by then."""
    subprocess.run([sys.executable, "-c", ENDED_AT_ONCE], cwd=ROOT, check=True, timeout=60)
