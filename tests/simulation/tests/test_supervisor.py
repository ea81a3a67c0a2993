"""Decisions of the supervisor when services end, fail, hang or are drained; their processes are virtual."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import math
import random
import re
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from types import TracebackType

import pytest

from meshrl.contract.errors import ConflictError, UserError
from meshrl.launcher import supervisor
from meshrl.launcher.preloading import Preloading
from meshrl.launcher.processes import LineSink, ServiceProcess, Watchdog
from meshrl.launcher.service import Service
from meshrl.launcher.supervisor import (
    FIRST_BACKOFF_S,
    LONGEST_BACKOFF_S,
    PARTS_FAILED,
    PORT_TRIES,
    QUICK_FAILURES,
    QUICK_S,
    Supervisor,
    Verdict,
)
from meshrl.rpc.exit_codes import Exit

from ..virtual_time import in_virtual_time, run

FOREVER = math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """The behaviour of one process."""

    seconds: float = FOREVER
    """Wait until it ends by itself, with `code`."""
    code: int = 0
    says: str = "nothing"
    ready_s: float = 0.0
    drain_s: float = 0.01
    """Wait until SIGTERM ends it."""
    refused: bool = False
    """The system starts no process at the moment."""
    missing: bool = False
    """There is no such program."""


WORKS = Life()
BURNS = Life(seconds=0.1, code=1, says="RuntimeError: the disk is on fire", ready_s=FOREVER)
LINE = "it last said: RuntimeError: the disk is on fire"


class Process(ServiceProcess):
    """A process without an operating system."""

    def __init__(self, service: Service, life: Life, pid: int) -> None:
        loop = asyncio.get_running_loop()
        self.service, self.life, self.pid = service, life, pid
        self.started, self.ready_at = loop.time(), None
        self.signals: list[float] = []
        self._tail = [life.says]  # type: ignore[assignment]
        self._ended: asyncio.Future[int] = loop.create_future()
        self.done = asyncio.create_task(self._wait())
        self.over_at = FOREVER
        if life.seconds < FOREVER:
            loop.call_later(life.seconds, self.end, life.code)

    async def _wait(self) -> int:
        return await self._ended

    def end(self, code: int) -> None:
        if not self._ended.done():
            self._ended.set_result(code)
            self.over_at = asyncio.get_running_loop().time()

    def drain(self) -> None:
        loop = asyncio.get_running_loop()
        self.signals.append(loop.time())
        if self.life.drain_s < FOREVER:
            loop.call_later(self.life.drain_s, self.end, 0)

    def kill_group(self) -> None:
        self.end(-signal.SIGKILL)


class NoWatchdog(Watchdog):
    """Nothing has to outlive the supervisor."""

    def __enter__(self) -> Watchdog:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        return

    def _send(self, line: str) -> None:
        return


class Mesh:
    """A supervisor, the lives of its services one after the other (the last again and again), and its log."""

    def __init__(self) -> None:
        self.lives: dict[str, Sequence[Life]] = {}
        self.processes: list[Process] = []
        self.log: list[tuple[str, str]] = []
        self.steps = 0
        self.looked: list[set[str]] = []
        """The running services, at each look."""
        self._pids = itertools.count(1)
        self._starts: dict[str, int] = {}
        self.supervisor: Supervisor

    def service(self, name: str, *lives: Life, **rules: object) -> Service:
        self.lives[name] = lives or (WORKS,)

        async def probe() -> bool:
            process = self.of(name)[-1]
            return asyncio.get_running_loop().time() - process.started >= process.life.ready_s

        return Service(name=name, argv=(name,), **{"probe": probe, **rules})  # type: ignore[arg-type]

    def supervise(self, *services: Service) -> Supervisor:
        self.supervisor = Supervisor(
            services,
            self.sink,
            start=self.start,
            watchdog=NoWatchdog(),
            steps=lambda: self.steps,
            last_look=self.look,
        )
        return self.supervisor

    async def start(
        self, service: Service, sink: LineSink, preloading: Preloading | None
    ) -> ServiceProcess:
        number = self._starts[service.name] = self._starts.get(service.name, -1) + 1
        lives = self.lives[service.name]
        life = lives[min(number, len(lives) - 1)]
        if life.refused:
            raise OSError(errno.EAGAIN, "Resource temporarily unavailable")
        if life.missing:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", "srun")
        process = Process(service, life, next(self._pids))
        self.processes.append(process)
        return process

    async def look(self) -> None:
        self.looked.append({process.service.name for process in self.processes if process.running})

    def sink(self, name: str, line: str) -> None:
        self.log.append((name, line))

    def of(self, name: str) -> list[Process]:
        return [process for process in self.processes if process.service.name == name]

    def phase(self, name: str) -> str:
        return self.supervisor.states[name].phase

    def said(self, line: str) -> bool:
        return any(line in said for _, said in self.log)

    @contextlib.asynccontextmanager
    async def running(self, *services: Service) -> AsyncIterator[asyncio.Task[Verdict]]:
        task = asyncio.create_task(self.supervise(*services).run())
        try:
            yield task
        finally:
            self.supervisor.stop("test over", 1)
            self.supervisor.stop("test over", 1)
            await task


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(3600):
        while not condition():  # noqa: ASYNC110 - no event says it
            await asyncio.sleep(0.1)


@in_virtual_time
async def test_a_crash_loop_ends_the_run_with_the_last_error_line() -> None:
    mesh = Mesh()
    verdict = await mesh.supervise(mesh.service("rollout-0", BURNS)).run()
    assert (verdict.code, verdict.line) == (
        Exit.FAILED,
        f"rollout-0 failed {QUICK_FAILURES} times in a row; {LINE}",
    )
    assert len(mesh.processes) == QUICK_FAILURES


@in_virtual_time
async def test_a_service_that_worked_for_a_while_between_its_ends_is_no_crash_loop() -> None:
    mesh = Mesh()
    dies = Life(seconds=2 * QUICK_S, code=1)
    async with mesh.running(mesh.service("reward", dies)) as over:
        await until(lambda: mesh.supervisor.states["reward"].restarts == 10)
        assert not over.done()


@in_virtual_time
async def test_ends_between_which_the_run_made_steps_are_no_crash_loop() -> None:
    mesh = Mesh()
    dies = Life(seconds=QUICK_S / 2, code=-signal.SIGKILL)
    async with mesh.running(mesh.service("trainer", dies)) as over:
        for life in range(1, 10):
            await until(lambda life=life: len(mesh.of("trainer")) == life)  # type: ignore[misc]
            await until(lambda: mesh.phase("trainer") == "ready")
            await asyncio.sleep(QUICK_S / 4)
            mesh.steps += 1
        assert not over.done()
        await until(lambda: over.done())  # it makes none from here on
        assert "trainer failed 3 times in a row" in (await over).line


@in_virtual_time
async def test_steps_say_nothing_of_one_of_a_fleet_nor_of_a_service_that_was_not_ready() -> None:
    mesh = Mesh()

    async def train() -> None:
        while True:
            mesh.steps += 1
            await asyncio.sleep(0.05)

    training = asyncio.create_task(train())
    worker = mesh.service("rollout-1", Life(seconds=1, code=1), fleet="rollout")
    async with mesh.running(mesh.service("rollout-0", fleet="rollout"), worker):
        await until(lambda: mesh.phase("rollout-1") == "failed")
    verdict = await mesh.supervise(mesh.service("reference", BURNS)).run()
    assert verdict.line == f"reference failed 3 times in a row; {LINE}"
    training.cancel()


@in_virtual_time
async def test_what_the_machine_refuses_is_not_tried_again() -> None:
    mesh = Mesh()
    says = "error: /dev/shm: No space left on device"
    refused = Life(seconds=60, code=Exit.REFUSED, says=says)
    verdict = await mesh.supervise(mesh.service("trainer", refused), mesh.service("queue")).run()
    assert (verdict.code, verdict.line) == (
        Exit.FAILED,
        "trainer: /dev/shm: No space left on device",
    )
    assert len(mesh.of("trainer")) == 1
    missing = mesh.service("reward", Life(missing=True))
    verdict = await mesh.supervise(missing, mesh.service("queue")).run()
    assert verdict.line == "reward cannot be started: srun: No such file or directory"


@in_virtual_time
async def test_a_user_error_is_not_tried_again() -> None:
    mesh = Mesh()
    wrong = Life(seconds=0.1, code=Exit.USER_ERROR, says="error: data.train_files.0: no such file")
    verdict = await mesh.supervise(
        mesh.service("feeder", wrong, finite=True), mesh.service("queue")
    ).run()
    assert (verdict.code, verdict.line) == (
        Exit.USER_ERROR,
        "feeder: data.train_files.0: no such file",
    )
    assert len(mesh.of("feeder")) == 1


@in_virtual_time
async def test_a_service_whose_work_is_done_is_left_alone() -> None:
    mesh = Mesh()
    async with mesh.running(mesh.service("feeder", Life(seconds=1), finite=True)) as over:
        await until(lambda: mesh.phase("feeder") == "done")
        await asyncio.sleep(600)
        assert not over.done() and len(mesh.processes) == 1


@in_virtual_time
async def test_a_service_that_ends_though_it_has_work_is_started_again() -> None:
    mesh = Mesh()
    async with mesh.running(mesh.service("reward", Life(seconds=0.3), WORKS)):
        await until(lambda: len(mesh.of("reward")) == 2)
        assert mesh.said("reward ended although it had work to do; starting it again in 0.4 s")


@in_virtual_time
async def test_a_port_that_is_taken_is_replaced_before_anybody_hears_of_it() -> None:
    mesh, moved = Mesh(), []
    taken = Life(seconds=0.1, code=Exit.PORT_IN_USE, ready_s=FOREVER)
    rules = {"finite": True, "leads": True, "on_port_taken": lambda: moved.append(1)}
    trainer = mesh.service("trainer", *[taken] * PORT_TRIES, Life(seconds=1), **rules)
    assert (await mesh.supervise(trainer).run()).finished
    assert len(moved) == PORT_TRIES
    assert mesh.supervisor.states["trainer"].restarts == 0


@in_virtual_time
async def test_a_service_that_cannot_be_restarted_ends_the_run_and_says_why() -> None:
    mesh = Mesh()
    killed = Life(seconds=60, code=-signal.SIGKILL)
    queue = mesh.service("queue", killed, cannot_restart="its rows were in memory")
    verdict = await mesh.supervise(queue).run()
    assert (verdict.code, verdict.line) == (
        Exit.FAILED,
        "queue was killed by SIGKILL and cannot be restarted: its rows were in memory",
    )


@in_virtual_time
@pytest.mark.parametrize("by", [signal.SIGABRT, signal.SIGBUS, signal.SIGSEGV])
async def test_a_service_that_crashes_on_a_damaged_file_ends_the_run_at_once(
    by: signal.Signals,
) -> None:
    mesh = Mesh()
    crashes = Life(seconds=0.3, ready_s=60, code=-by)
    queue = mesh.service("queue", crashes, crash_at_start="data.mdb is damaged: restore a backup")
    verdict = await mesh.supervise(queue).run()
    assert (verdict.code, verdict.line) == (
        Exit.USER_ERROR,
        f"queue was killed by {by.name} before it was ready: data.mdb is damaged: restore a backup",
    )
    assert len(mesh.processes) == 1


@in_virtual_time
@pytest.mark.parametrize(
    "ends",
    [Life(seconds=60, code=-signal.SIGBUS), Life(seconds=1, ready_s=9, code=-signal.SIGKILL)],
)
async def test_a_service_that_was_ready_or_was_killed_is_started_again(ends: Life) -> None:
    mesh = Mesh()
    queue = mesh.service("queue", ends, WORKS, crash_at_start="data.mdb is damaged")
    async with mesh.running(queue) as over:
        await until(lambda: len(mesh.of("queue")) == 2 and mesh.phase("queue") == "ready")
        assert not over.done()


@in_virtual_time
async def test_a_drained_service_is_not_started_again_and_the_run_goes_on() -> None:
    mesh = Mesh()
    worker = mesh.service("rollout-0", removable=True)
    async with mesh.running(mesh.service("queue"), worker) as over:
        await until(lambda: mesh.phase("rollout-0") == "ready")
        drain = mesh.supervisor.drain
        assert await asyncio.gather(drain("rollout-0"), drain("rollout-0")) == [True, True]
        await asyncio.sleep(60)
        assert mesh.phase("rollout-0") == "drained" and not over.done()
        assert len(mesh.of("rollout-0")) == 1 and len(mesh.of("rollout-0")[0].signals) == 1
        assert await drain("rollout-0")  # draining again is having drained


@pytest.mark.parametrize("ends", [Life(seconds=30), WORKS], ids=["finished", "stopped"])
@in_virtual_time
async def test_the_ledger_is_read_when_all_but_the_queue_have_ended(ends: Life) -> None:
    mesh = Mesh()
    services = [
        mesh.service("queue", drain_order=2),
        mesh.service("trainer", replace(ends, drain_s=5), leads=True, finite=True),
        mesh.service("reward", Life(drain_s=7), drain_order=1),
    ]
    async with mesh.running(*services) as running:
        await until(lambda: mesh.phase("reward") == "ready")
        if ends is WORKS:
            mesh.supervisor.stop("stopped by Ctrl-C", 130)
        verdict = await running
    assert mesh.looked == [{"queue"}]
    assert (
        mesh.said("all steps are done: the services end") is verdict.finished is (ends is not WORKS)
    )


@in_virtual_time
async def test_a_service_that_will_not_drain_is_killed() -> None:
    mesh = Mesh()
    deaf = mesh.service("rollout-0", Life(drain_s=FOREVER), removable=True, drain_s=20)
    async with mesh.running(deaf):
        await until(lambda: mesh.phase("rollout-0") == "ready")
        assert not await mesh.supervisor.drain("rollout-0")
        assert mesh.phase("rollout-0") == "drained"


@in_virtual_time
async def test_a_service_can_be_drained_while_it_starts_or_waits_to_be_started_again() -> None:
    mesh = Mesh()
    starting = mesh.service("starting", Life(ready_s=FOREVER), removable=True)
    crashing = mesh.service("crashing", Life(seconds=0.1, code=3), removable=True)
    async with mesh.running(starting, crashing) as over:
        await until(lambda: mesh.phase("crashing") == "restarting")
        await mesh.supervisor.drain("crashing")
        await mesh.supervisor.drain("starting")
        assert {state.phase for state in mesh.supervisor.states.values()} == {"drained"}
        assert not over.done()


@in_virtual_time
async def test_what_cannot_be_drained_is_said() -> None:
    mesh = Mesh()
    async with mesh.running(mesh.service("queue")):
        await until(lambda: mesh.phase("queue") == "ready")
        with pytest.raises(UserError, match="queue cannot be drained"):
            await mesh.supervisor.drain("queue")
        with pytest.raises(UserError, match=r"no service rollout-7 \(it has: queue\)"):
            await mesh.supervisor.drain("rollout-7")
    with pytest.raises(ConflictError, match="the run is over"):
        mesh.supervisor.add(mesh.service("rollout-1"))


@in_virtual_time
async def test_an_added_service_that_keeps_failing_does_not_end_the_run() -> None:
    mesh = Mesh()
    wrong = Life(seconds=0.1, code=Exit.USER_ERROR, says="error: no model")
    queue, first = mesh.service("queue"), mesh.service("rollout-0", fleet="rollout")
    async with mesh.running(queue, first) as over:
        added = mesh.service("rollout-1", wrong, fleet="rollout")
        mesh.supervisor.add(replace(added, expendable=True))
        await until(lambda: mesh.phase("rollout-1") == "failed")
        assert not over.done()
    assert mesh.said("the run continues without it: rollout-1: no model")


@in_virtual_time
async def test_the_run_goes_on_without_one_of_a_fleet_that_keeps_failing() -> None:
    mesh = Mesh()
    works = mesh.service("rollout-0", fleet="rollout")
    async with mesh.running(works, mesh.service("rollout-1", BURNS, fleet="rollout")) as over:
        await until(lambda: mesh.phase("rollout-1") == "failed")
        assert not over.done()
    assert mesh.said(f"continues without it: rollout-1 failed {QUICK_FAILURES} times")


@in_virtual_time
async def test_a_fleet_that_fails_as_a_whole_ends_the_run_in_one_line() -> None:
    mesh = Mesh()
    fleet = [mesh.service(f"rollout-{n}", BURNS, fleet="rollout") for n in range(2)]
    verdict = await mesh.supervise(mesh.service("queue"), *fleet).run()
    assert verdict.code == Exit.FAILED
    assert re.fullmatch(
        rf"no rollout worker is left of 2: rollout-[01] failed 3 times in a row; {LINE}",
        verdict.line,
    )


@in_virtual_time
async def test_lives_in_which_nothing_got_done_are_failures_however_long() -> None:
    mesh = Mesh()
    idle = Life(seconds=900, code=Exit.NO_PROGRESS, says="error: the engine fails")
    verdict = await mesh.supervise(mesh.service("rollout-0", idle, fleet="rollout")).run()
    assert (verdict.code, verdict.line) == (
        Exit.FAILED,
        "rollout-0 failed 3 times in a row; it last said: error: the engine fails",
    )


@in_virtual_time
async def test_a_trainer_that_finds_out_what_it_dies_of_may_fail_more_often() -> None:
    mesh = Mesh()
    dies = Life(seconds=1, code=1)
    looks = Life(seconds=1, code=Exit.PART_FAILED)
    found = [dies, dies, *[looks] * PARTS_FAILED, Life(seconds=1, code=0)]
    trainer = mesh.service("trainer", *found, finite=True, leads=True)
    assert (await mesh.supervise(trainer).run()).finished
    mesh = Mesh()
    verdict = await mesh.supervise(mesh.service("trainer", dies, dies, looks)).run()
    assert verdict.line.startswith("trainer failed 3 times in a row")
    assert mesh.supervisor.states["trainer"].restarts == 2 + PARTS_FAILED


@in_virtual_time
@pytest.mark.parametrize("code", [-signal.SIGSEGV, -signal.SIGKILL, 128 + signal.SIGSEGV])
async def test_a_trainer_that_is_killed_at_its_work_may_be_what_its_rows_do(code: int) -> None:
    """The queue finds the row in ever smaller parts, or gives it up: a rank's signal is 128 + N of its launcher."""
    dies = Life(seconds=1, code=code)
    mesh = Mesh()
    rules = {"finite": True, "leads": True}
    trainer = mesh.service("trainer", *[dies] * PARTS_FAILED, Life(seconds=1, code=0), **rules)
    assert (await mesh.supervise(trainer).run()).finished
    mesh = Mesh()
    verdict = await mesh.supervise(mesh.service("trainer", dies, **rules)).run()
    assert verdict.line.startswith("trainer failed 3 times in a row")
    assert mesh.supervisor.states["trainer"].restarts == 1 + PARTS_FAILED
    mesh = Mesh()
    never_ready = Life(seconds=1, code=code, ready_s=FOREVER)
    assert not (await mesh.supervise(mesh.service("trainer", never_ready, **rules)).run()).finished
    assert len(mesh.processes) == QUICK_FAILURES


@in_virtual_time
async def test_a_port_that_stays_taken_ends_the_run_at_once() -> None:
    taken = Life(
        seconds=0.1, code=Exit.PORT_IN_USE, ready_s=FOREVER, says="error: 1.2.3.4:5 is in use"
    )
    mesh = Mesh()
    verdict = await mesh.supervise(mesh.service("queue", taken)).run()
    assert (verdict.code, verdict.line) == (Exit.FAILED, "queue: 1.2.3.4:5 is in use")
    assert len(mesh.processes) == 1


@in_virtual_time
async def test_a_bus_error_where_shared_memory_is_full_ends_the_run_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A process that writes to a page for which there is no room is killed, and would be again."""
    full: list[str] = []
    monkeypatch.setattr(supervisor, "full_places", lambda: iter(full))
    dies = Life(seconds=60, code=-signal.SIGBUS)
    mesh = Mesh()
    async with mesh.running(mesh.service("trainer", dies)) as over:
        await until(lambda: len(mesh.of("trainer")) == 4)
        full.append("/dev/shm")
        await until(lambda: over.done())
        assert (
            await over
        ).line == "trainer was killed by SIGBUS: /dev/shm: No space left on device"


@in_virtual_time
async def test_steps_speak_for_the_only_one_of_a_fleet() -> None:
    mesh = Mesh()
    dies = Life(seconds=QUICK_S / 2, code=-signal.SIGKILL)
    async with mesh.running(mesh.service("rollout-0", dies, fleet="rollout")) as over:
        for life in range(1, 10):
            await until(lambda life=life: len(mesh.of("rollout-0")) == life)  # type: ignore[misc]
            await until(lambda: mesh.phase("rollout-0") == "ready")
            await asyncio.sleep(QUICK_S / 4)
            mesh.steps += 1
        assert not over.done()


@in_virtual_time
async def test_a_worker_that_the_system_refuses_for_good_costs_the_run_that_worker_alone() -> None:
    mesh = Mesh()
    refused = mesh.service("rollout-0", Life(refused=True), fleet="rollout")
    late = mesh.service("rollout-1", Life(refused=True), WORKS, fleet="rollout")
    async with mesh.running(refused, late) as over:
        await until(lambda: mesh.phase("rollout-0") == "failed")
        await until(lambda: mesh.phase("rollout-1") == "ready")
        assert not over.done()
    assert mesh.said("the run continues without it: rollout-0 failed 3 times")
    assert mesh.said("rollout-1 could not be started; starting it again in 0.4 s")


@in_virtual_time
async def test_a_start_that_takes_long_says_what_it_does_and_a_hanging_one_is_ended() -> None:
    mesh = Mesh()
    loading = Life(ready_s=FOREVER, says="layer 3 of 64")
    async with mesh.running(mesh.service("rollout-0", loading, ready_s=100)):
        await until(lambda: mesh.said("rollout-0 was not ready after 100 s; killing it"))
    assert mesh.said("rollout-0 has been starting for 30 of at most 100 s; it last said: layer 3")


ENDS = (
    *[Life(seconds=600, code=code) for code in (-9, 1, Exit.NO_PROGRESS)],
    *[Life(seconds=1, code=code) for code in (-9, 1, Exit.USER_ERROR)],
    Life(seconds=1, code=1, ready_s=FOREVER),
    Life(ready_s=FOREVER),
    Life(refused=True),
    Life(seconds=600, code=1, ready_s=20),
    Life(seconds=600, code=1, drain_s=FOREVER),
)


@pytest.mark.parametrize("seed", range(20))
def test_whatever_happens_to_processes_a_run_ends_once_and_leaves_none(seed: int) -> None:
    draw = random.Random(seed)
    mesh = Mesh()

    def lives(*last: Life) -> list[Life]:
        return [*draw.choices(ENDS, k=draw.choice((0, 0, 1, 2, 4))), *last]

    async def whole() -> tuple[Verdict, float]:
        fleet = [
            mesh.service(f"rollout-{n}", *lives(WORKS), fleet="rollout", start_order=1)
            for n in range(draw.randint(1, 3))
        ]
        services = [
            mesh.service("queue", *lives(WORKS), drain_order=2),
            mesh.service("feeder", *lives(Life(seconds=30)), finite=True, drain_order=1),
            *(replace(each, removable=True) for each in fleet),
            mesh.service(
                "trainer", *lives(Life(seconds=2000)), start_order=2, finite=True, leads=True
            ),
        ]
        supervisor = mesh.supervise(*(replace(service, ready_s=30) for service in services))
        loop = asyncio.get_running_loop()
        over_at: list[float] = []

        async def note(what: Awaitable[object]) -> None:
            await what
            over_at.append(loop.time())

        running = asyncio.create_task(supervisor.run())
        watching = asyncio.create_task(note(supervisor._over.wait()))
        others = []
        if draw.random() < 0.5:
            others.append(_later(draw.uniform(0, 900), supervisor.drain, "rollout-0"))
        if draw.random() < 0.3:
            stop = draw.uniform(0, 900)
            others.append(_later(stop, asyncio.to_thread, supervisor.stop, "stopped", 130))
        tasks = [asyncio.create_task(each) for each in others]
        async with asyncio.timeout(50_000):
            verdict = await running
        await watching
        await asyncio.gather(*tasks)
        return verdict, over_at[0]

    verdict, over_at = run(seed, whole())
    assert not [process.pid for process in mesh.processes if process.running]
    assert all(process.started <= over_at for process in mesh.processes)
    for name in mesh.lives:
        one_after_the_other = mesh.of(name)
        for before, after in itertools.pairwise(one_after_the_other):
            assert before.over_at + 2 * FIRST_BACKOFF_S <= after.started + 1e-9
            assert before._ended.result() != Exit.USER_ERROR
            if not mesh.said(f"{name} could not be started"):
                assert after.started - before.over_at <= LONGEST_BACKOFF_S + 1
    trainer = mesh.of("trainer")
    done = bool(trainer) and trainer[-1]._ended.result() == 0 and not trainer[-1].signals
    assert verdict.finished == done, verdict


async def _later(seconds: float, call: Callable[..., Awaitable[object]], *args: object) -> None:
    await asyncio.sleep(seconds)
    with contextlib.suppress(ConflictError):
        await call(*args)
