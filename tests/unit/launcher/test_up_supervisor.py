"""The supervisor against real processes and real signals; simulation/tests/test_supervisor.py has what it decides."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import textwrap
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from meshrl.contract.errors import ConflictError
from meshrl.launcher.service import Service
from meshrl.launcher.supervisor import Supervisor, Verdict

from ...waiting import gone, runs, until

WORKS = "import signal, time; signal.signal(signal.SIGTERM, lambda *_: exit(0)); time.sleep(600)"
"""A service that works until it is asked to drain."""


def process(name: str, source: str, **rules: object) -> Service:
    argv = (sys.executable, "-c", textwrap.dedent(source))
    return Service(name=name, argv=argv, **rules)  # type: ignore[arg-type]


class Log(list[tuple[str, str]]):
    def __call__(self, name: str, line: str) -> None:
        self.append((name, line))

    def of(self, name: str) -> list[str]:
        return [line for who, line in self if who == name]


@contextlib.asynccontextmanager
async def running(supervisor: Supervisor) -> AsyncIterator[asyncio.Task[Verdict]]:
    task = asyncio.create_task(supervisor.run())
    try:
        yield task
    finally:
        supervisor.stop("test over", 1)
        supervisor.stop("test over", 1)
        await task


async def test_the_run_is_over_when_the_leading_service_is_done() -> None:
    log = Log()
    services = [
        process("queue", WORKS, drain_order=1),
        process("trainer", "print('learned')", finite=True, leads=True, start_order=1),
    ]
    verdict = await Supervisor(services, log).run()
    assert verdict.finished
    assert log.of("trainer") == ["learned"]


async def test_a_group_of_services_starts_only_when_the_group_before_is_ready(
    tmp_path: Path,
) -> None:
    flag = tmp_path / "queue-is-ready"

    async def probe() -> bool:
        return flag.exists()

    queue = process(
        "queue",
        f"import pathlib, time; time.sleep(0.3); pathlib.Path({str(flag)!r}).touch();{WORKS}",
        probe=probe,
    )
    trainer = process(
        "trainer",
        f"import pathlib; assert pathlib.Path({str(flag)!r}).exists()",
        finite=True,
        leads=True,
        start_order=1,
    )
    verdict = await Supervisor([queue, trainer], Log()).run()
    assert verdict.finished


async def test_a_service_that_is_killed_is_started_again() -> None:
    log = Log()
    supervisor = Supervisor([process("reward", WORKS)], log)
    async with running(supervisor):
        await until(lambda: supervisor.states["reward"].phase == "ready")
        first = supervisor.states["reward"].pid
        os.kill(first, signal.SIGKILL)
        await until(lambda: supervisor.states["reward"].pid != first)
        await until(lambda: supervisor.states["reward"].phase == "ready")
        assert supervisor.states["reward"].restarts == 1
        assert "reward was killed by SIGKILL; starting it again in 0.4 s" in log.of("up")


async def test_a_stop_drains_in_order(tmp_path: Path) -> None:
    order = tmp_path / "order"

    def drains(name: str) -> str:
        return f"""
            import pathlib, signal, time
            def drain(*_):
                time.sleep(0.1)
                with pathlib.Path({str(order)!r}).open("a") as file:
                    file.write("{name} ")
                exit(0)
            signal.signal(signal.SIGTERM, drain)
            print("up", flush=True)
            time.sleep(600)
        """

    log = Log()
    services = [
        process("queue", drains("queue"), drain_order=2),
        process("reward", drains("reward"), drain_order=1),
        process("trainer", drains("trainer"), drain_order=0, leads=True, finite=True),
    ]
    supervisor = Supervisor(services, log)
    task = asyncio.create_task(supervisor.run())
    await until(lambda: all("up" in log.of(service.name) for service in services))
    supervisor.stop("stopped by Ctrl-C", 130)
    verdict = await task
    assert (verdict.code, verdict.line) == (130, "stopped by Ctrl-C")
    assert order.read_text().split() == ["trainer", "reward", "queue"]


async def test_a_second_stop_kills_at_once() -> None:
    stubborn = """
        import signal, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("up", flush=True)
        time.sleep(600)
    """
    log = Log()
    supervisor = Supervisor([process("trainer", stubborn, drain_s=600)], log)
    task = asyncio.create_task(supervisor.run())
    await until(lambda: log.of("trainer") == ["up"])
    supervisor.stop("stopped", 130)
    supervisor.stop("stopped", 130)
    await task
    assert not runs(supervisor.states["trainer"].pid)


async def test_what_a_launcher_started_elsewhere_drains_at_the_end_of_its_input() -> None:
    passes_input_on = """
        import signal, sys
        signal.signal(signal.SIGTERM, lambda *_: print("SIGTERM", flush=True))
        print("up", flush=True)
        sys.stdin.read()
        print("drained", flush=True)
    """
    log = Log()
    supervisor = Supervisor([process("rollout-0", passes_input_on, elsewhere=True)], log)
    task = asyncio.create_task(supervisor.run())
    await until(lambda: log.of("rollout-0") == ["up"])
    supervisor.stop("stopped", 143)
    await task
    assert log.of("rollout-0") == ["up", "drained"]


async def test_a_launcher_is_interrupted_where_its_service_must_be_killed() -> None:
    hangs = """
        import signal, time
        def interrupted(*_):
            print("interrupted", flush=True)
            exit(1)
        signal.signal(signal.SIGINT, interrupted)
        print("up", flush=True)
        time.sleep(600)
    """
    log = Log()
    supervisor = Supervisor([process("rollout-0", hangs, elsewhere=True, drain_s=0.1)], log)
    task = asyncio.create_task(supervisor.run())
    await until(lambda: log.of("rollout-0") == ["up"])
    supervisor.stop("stopped", 143)
    await task
    assert log.of("rollout-0") == ["up", "interrupted"]


async def test_what_a_service_started_goes_with_it(tmp_path: Path) -> None:
    parent = """
        import subprocess, sys, time
        print(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid, flush=True)
        time.sleep(600)
    """
    log = Log()
    supervisor = Supervisor([process("reward", parent)], log)
    async with running(supervisor):
        await until(lambda: len(log.of("reward")) == 1)
        os.kill(supervisor.states["reward"].pid, signal.SIGKILL)
        grandchild = int(log.of("reward")[0])
        await gone(grandchild)


PARENT = """
import asyncio, sys
from meshrl.launcher.service import Service
from meshrl.launcher.supervisor import Supervisor, Verdict

CHILD = '''
import os, subprocess, sys, time
from meshrl.common.process_guard import die_with_supervisor
die_with_supervisor()
other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(os.getpid(), other.pid, flush=True)
time.sleep(600)
'''
service = Service(name="reward", argv=(sys.executable, "-c", CHILD))
asyncio.run(Supervisor([service], lambda name, line: print(line, flush=True)).run())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
async def test_no_orphan_survives_the_supervisors_sudden_death() -> None:
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PARENT, stdout=asyncio.subprocess.PIPE
    )
    assert parent.stdout is not None
    child, grandchild = map(int, (await parent.stdout.readline()).split())
    assert runs(child) and runs(grandchild)
    parent.kill()
    await gone(child)
    await gone(grandchild)
    await parent.wait()


async def test_every_child_computes_on_one_thread_by_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    show = "import os; print(os.environ['OMP_NUM_THREADS'])"
    for env, threads in (({}, "1"), ({"OMP_NUM_THREADS": "4"}, "4")):
        log = Log()
        await Supervisor([process("trainer", show, finite=True, leads=True, env=env)], log).run()
        assert log.of("trainer") == [threads]


async def test_an_added_service_is_supervised_and_drained_like_the_others() -> None:
    supervisor = Supervisor([process("queue", WORKS, drain_order=1)], Log())
    async with running(supervisor):
        await until(lambda: supervisor.states["queue"].phase == "ready")
        supervisor.add(process("rollout-1", WORKS, removable=True))
        with pytest.raises(ConflictError, match="has a rollout-1 already"):
            supervisor.add(process("rollout-1", WORKS))
        await until(lambda: supervisor.states["rollout-1"].phase == "ready")
        first = supervisor.states["rollout-1"].pid
        os.kill(first, signal.SIGKILL)
        await until(lambda: supervisor.states["rollout-1"].pid != first)
    assert not runs(supervisor.states["rollout-1"].pid)
