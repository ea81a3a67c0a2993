"""The supervisor against real processes and real signals."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import re
import signal
import sys
import textwrap
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from meshrl.contract.errors import ConflictError, UnavailableError, UserError
from meshrl.launcher.service import Service
from meshrl.launcher.supervisor import Supervisor, Verdict
from meshrl.rpc.exit_codes import Exit

WORKS = "import signal, time; signal.signal(signal.SIGTERM, lambda *_: exit(0)); time.sleep(600)"
"""A service that works until it is asked to drain."""


def process(name: str, source: str, **rules: object) -> Service:
    argv = (sys.executable, "-c", textwrap.dedent(source))
    return Service(name=name, argv=lambda: argv, **rules)  # type: ignore[arg-type]


class Log(list[tuple[str, str]]):
    def __call__(self, name: str, line: str) -> None:
        self.append((name, line))

    def of(self, name: str) -> list[str]:
        return [line for who, line in self if who == name]


async def never() -> bool:
    return False


@contextlib.asynccontextmanager
async def running(supervisor: Supervisor) -> AsyncIterator[asyncio.Task[Verdict]]:
    task = asyncio.create_task(supervisor.run())
    try:
        yield task
    finally:
        supervisor.stop("test over", 1)
        supervisor.stop("test over", 1)
        await task


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(120):
        while not condition():  # noqa: ASYNC110 - what is waited for is another process
            await asyncio.sleep(0.02)


def alive(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


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


async def test_a_crash_loop_ends_the_run_with_the_last_error_line() -> None:
    crashes = "print('starting'); raise RuntimeError('the disk is on fire')"

    async def never() -> bool:
        return False

    supervisor = Supervisor([process("rollout-0", crashes, probe=never)], Log())
    verdict = await supervisor.run()
    assert verdict.code == Exit.FAILED
    assert verdict.line == (
        "rollout-0 failed 3 times in a row; it last said: RuntimeError: the disk is on fire"
    )


async def test_a_user_error_is_not_tried_again() -> None:
    wrong = (
        "import sys; print('error: data.train_files.0: no such file: x', file=sys.stderr); exit(2)"
    )
    supervisor = Supervisor([process("feeder", wrong, finite=True), process("queue", WORKS)], Log())
    verdict = await supervisor.run()
    assert verdict.code == Exit.USER_ERROR
    assert verdict.line == "feeder: data.train_files.0: no such file: x"
    assert supervisor.states["feeder"].restarts == 0


async def test_a_service_whose_work_is_done_is_left_alone() -> None:
    supervisor = Supervisor([process("feeder", "pass", finite=True)], Log())
    async with running(supervisor) as task:
        await until(lambda: supervisor.states["feeder"].phase == "done")
        assert not task.done()


async def test_a_service_that_ends_though_it_has_work_is_started_again() -> None:
    log = Log()
    supervisor = Supervisor([process("reward", "import time; time.sleep(0.3)")], log)
    async with running(supervisor):
        await until(lambda: supervisor.states["reward"].restarts > 0)
        assert log.of("up")[0].startswith("reward ended although it had work to do")


async def test_a_port_that_is_taken_is_replaced_before_anybody_hears_of_it() -> None:
    ports = [1, 2]

    def argv() -> tuple[str, ...]:
        return (sys.executable, "-c", f"exit({Exit.PORT_IN_USE.value} if {ports[0]} == 1 else 0)")

    trainer = Service(
        name="trainer",
        argv=argv,
        finite=True,
        leads=True,
        on_port_taken=lambda: ports.remove(1),
        probe=lambda: asyncio.sleep(0, result=False),
    )
    supervisor = Supervisor([trainer], Log())
    assert (await supervisor.run()).finished
    assert supervisor.states["trainer"].restarts == 0


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
    assert not alive(supervisor.states["trainer"].pid)


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
        await until(lambda: not alive(grandchild))


PARENT = """
import asyncio, sys
from meshrl.launcher.service import Service
from meshrl.launcher.supervisor import Supervisor, Verdict

CHILD = '''
import os, subprocess, sys, time
from meshrl.rpc.parent_death import die_with_parent
die_with_parent()
other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(os.getpid(), other.pid, flush=True)
time.sleep(600)
'''
service = Service(name="reward", argv=lambda: (sys.executable, "-c", CHILD))
asyncio.run(Supervisor([service], lambda name, line: print(line, flush=True)).run())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
async def test_no_orphan_survives_the_supervisors_sudden_death() -> None:
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PARENT, stdout=asyncio.subprocess.PIPE
    )
    assert parent.stdout is not None
    child, grandchild = map(int, (await parent.stdout.readline()).split())
    assert alive(child) and alive(grandchild)
    parent.kill()
    await until(lambda: not alive(child))
    await until(lambda: not alive(grandchild))
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


async def test_a_service_that_cannot_be_restarted_ends_the_run_and_says_why() -> None:
    queue = process("queue", WORKS, cannot_restart="its rows were in memory")
    supervisor = Supervisor([queue], Log())
    async with running(supervisor) as task:
        await until(lambda: supervisor.states["queue"].phase == "ready")
        os.kill(supervisor.states["queue"].pid, signal.SIGKILL)
        verdict = await task
    assert verdict.code == Exit.FAILED
    assert verdict.line == (
        "queue was killed by SIGKILL and cannot be restarted: its rows were in memory"
    )


async def test_a_drained_service_is_not_started_again_and_the_run_goes_on() -> None:
    services = [process("queue", WORKS), process("rollout-0", WORKS, removable=True)]
    supervisor = Supervisor(services, Log())
    async with running(supervisor) as run:
        await until(lambda: supervisor.states["rollout-0"].phase == "ready")
        pid = supervisor.states["rollout-0"].pid
        both = await asyncio.gather(supervisor.drain("rollout-0"), supervisor.drain("rollout-0"))
        assert both == [True, True]
        state = supervisor.states["rollout-0"]
        assert (state.phase, state.pid, state.restarts) == ("drained", pid, 0)
        assert not alive(pid) and not run.done()
        assert await supervisor.drain("rollout-0")  # draining again is having drained


async def test_a_service_that_will_not_drain_is_killed() -> None:
    ignores = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    deaf = f"{ignores}; print('deaf', flush=True); time.sleep(600)"
    log = Log()
    service = process("rollout-0", deaf, removable=True, drain_s=0.2)
    supervisor = Supervisor([service], log)
    async with running(supervisor):
        await until(lambda: log.of("rollout-0") == ["deaf"])
        assert not await supervisor.drain("rollout-0")
        assert supervisor.states["rollout-0"].phase == "drained"


async def test_a_service_can_be_drained_while_it_starts_or_waits_to_be_started_again() -> None:
    async def never() -> bool:
        return False

    services = [
        process("starting", WORKS, removable=True, probe=never, drain_s=5),
        process("crashing", "exit(3)", removable=True),
    ]
    supervisor = Supervisor(services, Log())
    async with running(supervisor) as run:
        await until(lambda: supervisor.states["crashing"].phase == "restarting")
        await supervisor.drain("crashing")
        await supervisor.drain("starting")
        assert {state.phase for state in supervisor.states.values()} == {"drained"}
        assert not run.done()


async def test_what_cannot_be_drained_is_said() -> None:
    supervisor = Supervisor([process("queue", WORKS)], Log())
    async with running(supervisor):
        await until(lambda: supervisor.states["queue"].phase == "ready")
        with pytest.raises(UserError, match="queue cannot be drained"):
            await supervisor.drain("queue")
        with pytest.raises(UserError, match=r"no service rollout-7 \(it has: queue\)"):
            await supervisor.drain("rollout-7")
    with pytest.raises(ConflictError, match="the run is over"):
        supervisor.add(process("rollout-1", WORKS))


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
    assert not alive(supervisor.states["rollout-1"].pid)


async def test_an_added_service_that_keeps_failing_does_not_end_the_run() -> None:
    log = Log()
    works = process("rollout-0", WORKS, fleet="rollout")
    supervisor = Supervisor([process("queue", WORKS), works], log)
    async with running(supervisor) as run:
        added = process("rollout-1", "print('error: no model'); exit(2)", fleet="rollout")
        supervisor.add(replace(added, expendable=True))
        await until(lambda: supervisor.states["rollout-1"].phase == "failed")
        assert not run.done()
    assert "the run goes on without it: rollout-1: no model" in log.of("up")


async def test_a_service_that_is_taken_on_ends_the_run_only_once_it_was_ready() -> None:
    log = Log()
    supervisor = Supervisor([process("queue-0", WORKS)], log)
    async with running(supervisor) as run:
        await until(lambda: supervisor.states["queue-0"].phase == "ready")
        with pytest.raises(UnavailableError, match="queue-1 cannot be started: no disk"):
            await supervisor.add_required(
                process("queue-1", "print('error: no disk'); exit(2)", probe=never)
            )
        assert "queue-1" not in supervisor.states
        await supervisor.add_required(process("queue-1", WORKS))
        pid = supervisor.states["queue-1"].pid
        await supervisor.dismiss("queue-1")
        assert not alive(pid) and not run.done()
        await supervisor.add_required(process("queue-1", WORKS, cannot_restart="it is in memory"))
        os.kill(supervisor.states["queue-1"].pid, signal.SIGKILL)
        verdict = await run
    assert "queue-1 was killed by SIGKILL and cannot be restarted" in verdict.line


BURNS = "raise RuntimeError('the disk is on fire')"


async def test_the_run_goes_on_without_one_of_a_fleet_that_keeps_failing() -> None:
    log = Log()
    services = [
        process("rollout-0", WORKS, fleet="rollout"),
        process("rollout-1", BURNS, fleet="rollout"),
    ]
    supervisor = Supervisor(services, log)
    async with running(supervisor) as run:
        await until(lambda: supervisor.states["rollout-1"].phase == "failed")
        assert not run.done()
    assert any("goes on without it: rollout-1 failed 3 times" in line for line in log.of("up"))


async def test_a_fleet_that_fails_as_a_whole_ends_the_run_in_one_line() -> None:
    services = [process(f"rollout-{n}", BURNS, fleet="rollout") for n in range(2)]
    verdict = await Supervisor([process("queue", WORKS), *services], Log()).run()
    assert verdict.code == Exit.FAILED
    assert re.fullmatch(
        r"no rollout worker is left of 2: rollout-[01] failed 3 times in a row; "
        r"it last said: RuntimeError: the disk is on fire",
        verdict.line,
    )


async def test_lives_in_which_nothing_got_done_are_failures_however_long() -> None:
    no_progress = f"import sys; print('error: the engine fails'); sys.exit({Exit.NO_PROGRESS})"
    services = [process("rollout-0", no_progress, fleet="rollout")]
    verdict = await Supervisor(services, Log(), quick_s=0.0).run()
    assert (verdict.code, verdict.line) == (
        Exit.FAILED,
        "rollout-0 failed 3 times in a row; it last said: error: the engine fails",
    )


def failing_to_start(times: int) -> Callable[[], tuple[str, ...]]:
    """A command whose process the system refuses so many times."""
    left = iter(range(times))

    def argv() -> tuple[str, ...]:
        if next(left, None) is not None:
            raise OSError(errno.EAGAIN, "Resource temporarily unavailable")
        return (sys.executable, "-c", WORKS)

    return argv


async def test_a_process_that_the_system_refuses_is_started_a_moment_later() -> None:
    log = Log()
    supervisor = Supervisor([Service(name="reward", argv=failing_to_start(2))], log)
    async with running(supervisor) as run:
        await until(lambda: supervisor.states["reward"].phase == "ready")
        assert not run.done()
    assert "reward could not be started; starting it again in 0.4 s" in log.of("up")


async def test_a_worker_that_the_system_refuses_for_good_costs_the_run_that_worker_alone() -> None:
    log = Log()
    fleet = {"fleet": "rollout", "removable": True}
    services = [
        Service(name="rollout-0", argv=failing_to_start(99), **fleet),  # type: ignore[arg-type]
        process("rollout-1", WORKS, **fleet),
    ]
    supervisor = Supervisor(services, log)
    async with running(supervisor) as run:
        await until(lambda: supervisor.states["rollout-0"].phase == "failed")
        await until(lambda: supervisor.states["rollout-1"].phase == "ready")
        assert not run.done()
    assert any("the run goes on without it: rollout-0 failed 3 times" in x for x in log.of("up"))


async def test_a_service_that_is_taken_on_and_cannot_be_started_says_why() -> None:
    supervisor = Supervisor([process("queue", WORKS)], Log())
    async with running(supervisor) as run:
        await until(lambda: supervisor.states["queue"].phase == "ready")
        with pytest.raises(UnavailableError, match=r"queue-1 cannot be started: .*temporarily"):
            await supervisor.add_required(Service(name="queue-1", argv=failing_to_start(99)))
        assert not run.done()


async def test_a_start_that_takes_long_says_what_it_does_and_a_hanging_one_is_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("meshrl.launcher.supervisor.START_LINE_S", 0.1)
    log = Log()
    loading = process(
        "rollout-0", f"print('layer 3 of 64', flush=True);{WORKS}", probe=never, ready_s=1.5
    )
    async with running(Supervisor([loading], log)):
        await until(lambda: any("was not ready after 2 s; killing it" in line for _, line in log))
    assert any(
        re.fullmatch(
            r"rollout-0 has been starting for \d of at most 2 s; it last said: layer 3 of 64", line
        )
        for line in log.of("up")
    )
