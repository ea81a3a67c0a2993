"""One run of a whole mesh: the services (services.py), a supervisor that starts them again, faults, checks.

A run ends when the trainer has trained on everything, the workers have drained and the queue has closed.
"""

from __future__ import annotations

import asyncio
import random
import re
import traceback
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np

from meshrl.contract.errors import (
    CapacityError,
    FencedError,
    InfraError,
    MeshError,
    UnavailableError,
    UserError,
    WaitTimeoutError,
)
from meshrl.contract.types import OnUpdate, Version
from meshrl.transferqueue.admin import audit
from tests.simulation.checks import Followers, Liveness, check_history, check_idle, check_resident
from tests.simulation.faults import Fault, Kind, draw_faults
from tests.simulation.loop import Process, SimulatedLoop, spawn
from tests.simulation.services import Incarnation, Main, Parts, Services
from tests.simulation.shape import RUN, Shape, draw_shape
from tests.simulation.stand_ins import Collectives
from tests.simulation.virtual_loop import START_S, DeadlockError, quiet

CHECK_EVERY_S: Final = 2.0
DRAIN_S: Final = 120.0
"""How long a service may take to drain at the end."""
CALM_S: Final = 60.0
"""Seconds after a fault in which a process that is cut off may not have been noticed yet."""
PATIENCE_S: Final = 3000.0
"""After the last fault everything must be trained within so many seconds."""
FLAP_S: Final = (0.5, 5.0)
"""The shortest and the longest time between two breaks of a link that flaps."""
EXPECTED: Final = (UnavailableError, FencedError, InfraError, WaitTimeoutError, CapacityError)
"""Errors with which a service may end: the supervisor starts it again."""
GAVE_UP: Final = r"(\d+) rows were dead-lettered while the trainer waited"
"""Error with which a trainer may end if so many rows died; its successor is the user's second attempt."""


@dataclass(slots=True, kw_only=True)
class Report:
    """The result of one run."""

    seed: int
    problems: list[str]
    log: list[str]
    """Events, line by line."""
    events: int
    """Callbacks that ran."""
    calls: int
    """RPCs."""
    virtual_s: float
    trace_hash: str
    samplings: Counter[str]
    """Rows given out for sampling, by task."""
    trained: int
    """Rows in the final weights."""


class Mesh:
    """The world of one run."""

    def __init__(
        self,
        seed: int,
        shape: Shape,
        faults: Sequence[Fault],
        *,
        parts: Parts | None = None,
        trace: bool = False,
    ) -> None:
        """Nothing runs before `run`."""
        self.loop = SimulatedLoop(seed, trace=trace)
        self.shape = shape
        self.problems: list[str] = []
        self.log: list[str] = []
        self._seed = seed
        self._faults = faults
        self._services = Services(
            seed, self.loop, shape, parts or Parts(), note=self.note, problem=self.problem
        )
        self._random = self._services.random
        self._lives: dict[str, Incarnation] = {}
        """The newest incarnation of each service."""
        self._ending = False
        self._halted_until = 0.0
        self._given_up: list[int] = []
        """The dead letters for which trainers have given up."""

    def run(self) -> Report:
        """The whole run, to its end or to its deadline."""
        random.seed(self._seed)
        np.random.seed(self._seed % 2**32)
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_until_complete(self.loop.create_task(self._main()))
        except DeadlockError as error:
            self.problem(str(error))
        except Exception as error:
            self.problem(f"the simulation failed: {type(error).__name__}: {error}")
            self.note(traceback.format_exc())
        finally:
            report = Report(
                seed=self._seed,
                problems=list(self.problems),
                log=list(self.log),
                events=self.loop.events,
                calls=self._services.network.made,
                virtual_s=self.loop.time() - START_S,
                trace_hash=self.loop.trace_hash,
                samplings=self._services.history.sampled,
                trained=len(self._services.trained_on or ()),
            )
            self.loop.close()
            self._services.weights.close()
            asyncio.set_event_loop(None)
        return report

    def note(self, what: str) -> None:
        """Add a line to the log; what is thrown away at the end adds none."""
        if not self.loop.over:
            self.log.append(f"{self.loop.time() - START_S:8.3f} s  {what}")

    def problem(self, what: str) -> None:
        """Something that must not be."""
        self.note(f"PROBLEM {what}")
        self.problems.append(what)

    # --- the services

    async def _main(self) -> None:
        supervise, services = self._supervise, self._services
        watching = [
            supervise("queue", services.serve_queue),
            supervise("feeder", services.feed, finite=True),
            *(supervise(f"rollout-{n}", services.roll_out) for n in range(self.shape.workers)),
            *(supervise(f"reward-{n}", services.score) for n in range(self.shape.rewards)),
            *(supervise(f"reference-{n}", services.refer) for n in range(self.shape.references)),
            *(supervise(f"agent-{n}", services.lead) for n in range(self.shape.agents)),
            self._supervise_trainer(),
            self._check_often(),
            self._do_faults(),
        ]
        tasks = [asyncio.create_task(coroutine) for coroutine in watching]
        for task in tasks:
            task.add_done_callback(self._watcher_ended)
        last = max((fault.at_s + fault.seconds for fault in self._faults), default=0.0)
        try:
            async with asyncio.timeout(last + PATIENCE_S):
                await self._services.done.wait()
        except TimeoutError:
            await self._name_the_culprit(last)
        else:
            await self._end()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._check_the_end()

    def _watcher_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            where = traceback.format_exception(error)
            self.problem(f"the simulation failed: {type(error).__name__}: {error}")
            self.note("".join(where))

    def _start(self, name: str, main: Main) -> Incarnation:
        process = Process(name)
        incarnation = Incarnation(process, asyncio.Event())
        process.on_death[incarnation.over.set] = None

        async def live() -> None:
            try:
                await main(incarnation)
            except asyncio.CancelledError:
                raise
            except BaseException as error:
                incarnation.error = _first(error)
                self.note(f"{name} ended: {type(incarnation.error).__name__}: {incarnation.error}")
                if not isinstance(incarnation.error, EXPECTED):
                    self.note(traceback.format_exc())
            finally:
                incarnation.ended = True
                incarnation.over.set()

        self._lives[name] = incarnation
        self.note(f"{name} starts")
        spawn(self.loop, process, live(), name)
        return incarnation

    async def _supervise(self, name: str, main: Main, *, finite: bool = False) -> None:
        """Start a service again whenever it ends; a finite one until it is done."""
        while not self._ending:
            if name == "queue":
                await self._until_the_host_is_up()
            incarnation = self._start(name, main)
            await incarnation.over.wait()
            finished = incarnation.ended and incarnation.error is None
            self._judge_end(name, incarnation)
            if finished and finite and incarnation.drain is None:
                return
            await asyncio.sleep(self._random.uniform(0.1, 2.0))

    def _judge_end(self, name: str, incarnation: Incarnation) -> None:
        error = incarnation.error
        if isinstance(error, UserError) and (lost := re.search(GAVE_UP, str(error))):
            self._given_up.append(int(lost[1]))
        elif error is not None and not isinstance(error, EXPECTED):
            self.problem(f"{name} ended with {type(error).__name__}: {error}")
        if incarnation.ended:
            if error is None:
                self._check_leaks(name, incarnation)
            incarnation.process.kill()

    def _check_leaks(self, name: str, incarnation: Incarnation) -> None:
        """A service that ended by itself leaves no task."""
        left = [task.get_name() for task in incarnation.process.running()]
        if len(left) > 1:  # the task of its main function is about to end
            self.problem(f"{name} ended and left {len(left) - 1} tasks: {', '.join(left)}")

    async def _supervise_trainer(self) -> None:
        """All ranks together: one that dies takes the others with it."""
        while not self._ending:
            await self._until_the_host_is_up()
            collectives = Collectives(self.loop, self.shape.ranks)
            ranks = [
                self._start(
                    f"trainer-{rank}" if rank else "trainer",
                    partial(self._services.train, collectives, rank),
                )
                for rank in range(self.shape.ranks)
            ]
            for rank in ranks:
                rank.process.on_death[collectives.end] = None
            waits = [asyncio.create_task(rank.over.wait()) for rank in ranks]
            pending = set(waits)
            while pending:
                _, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                if any(r.over.is_set() and (r.error or not r.ended) for r in ranks):
                    await asyncio.sleep(self._random.uniform(0.0, 1.0))
                    break
            for wait in waits:
                wait.cancel()
            for rank in ranks:
                if rank.over.is_set():
                    self._judge_end(rank.process.name, rank)
                if not self._is_zombie(rank):
                    rank.process.kill()
            if self._services.done.is_set():
                return
            await asyncio.sleep(self._random.uniform(0.2, 4.0))

    async def _until_the_host_is_up(self) -> None:
        await asyncio.sleep(max(0.0, self._halted_until - self.loop.time()))

    def _is_zombie(self, rank: Incarnation) -> bool:
        """Counts as dead and lives."""
        return rank.over.is_set() and not rank.ended and not rank.process.dead

    # --- faults

    async def _do_faults(self) -> None:
        for fault in self._faults:
            await asyncio.sleep(fault.at_s - (self.loop.time() - START_S))
            if self._services.done.is_set():
                return
            self.note(f"fault: {fault.kind} {fault.target} {fault.seconds:.2f} s")
            self._do(fault)

    def _do(self, fault: Fault) -> None:
        services, target = self._services, fault.target
        incarnation = self._lives.get(target)
        until = self.loop.time() + fault.seconds
        weather = services.network.weather(target)
        transfers = services.weights.transfers(target)
        engines = [e for process, e in services.weights.engines.items() if process.name == target]
        match fault.kind:
            case Kind.KILL:
                if incarnation is not None:
                    incarnation.process.kill()
            case Kind.STOP:
                self._drain(incarnation)
            case Kind.HALT:
                self._halted_until = until
                for name, each in self._lives.items():
                    if name.startswith(("queue", "trainer")):
                        self._drain(each)
            case Kind.CUT:
                services.network.cut(target, fault.seconds)
            case Kind.ZOMBIE:
                if incarnation is not None:
                    services.network.hide(incarnation.process, fault.seconds)
                    incarnation.over.set()
            case Kind.ISOLATED:
                if incarnation is not None:
                    services.network.hide(incarnation.process, fault.seconds, others="queue")
                    incarnation.over.set()
            case Kind.FLAPS:
                self._flap(target, until)
            case Kind.BREAK_REQUESTS:
                weather.break_requests_until = until
            case Kind.BREAK_ANSWERS:
                weather.break_answers_until = until
            case Kind.LATE_REQUESTS:
                weather.late_requests_until = until
            case Kind.SLOW:
                weather.slow_until = until
            case Kind.DISK_FULL:
                services.disk.full_until = until
            case Kind.COMMITS_FAIL:
                services.disk.failing_until = until
            case Kind.ENGINE_FAILS:
                for engine in engines:
                    engine.failing_until = until
            case Kind.JUDGE_FAILS:
                if target in services.judges:
                    services.judges[target].failing_until = until
            case Kind.LOADING_FAILS:
                for engine in engines:
                    engine.loading_fails_until = until
            case Kind.SWITCH_FAILS:
                for engine in engines:
                    engine.switch_fails_until = until
            case Kind.TRANSFER_HANGS:
                transfers.hanging_until = until
            case Kind.TRANSFER_CORRUPTS:
                transfers.corrupt_until = until
            case Kind.MEMORY_FULL:
                services.weights.memory.full_until = until

    def _flap(self, target: str, until: float) -> None:
        self._services.network.reset(target)
        again_s = self._random.uniform(*FLAP_S)
        if self.loop.time() + again_s < until:
            self.loop.call_later(again_s, self._flap, target, until)

    def _drain(self, incarnation: Incarnation | None) -> None:
        """SIGTERM."""
        if incarnation is None or incarnation.process.dead or incarnation.ended:
            return
        if incarnation.drain is None:
            incarnation.process.kill()  # it has not come so far yet
        else:
            self.loop.call_soon(incarnation.drain, context=incarnation.process.context())

    # --- checks

    async def _check_often(self) -> None:
        liveness, followers = Liveness(self.problem), Followers(self.problem)
        while True:
            await asyncio.sleep(CHECK_EVERY_S)
            if self._calm:
                followers.look(self._served, self.loop.time())
            else:
                followers.forget()
            if (queue := self._services.queue) is None:
                continue
            for run in queue.open_runs:
                check_resident(run, self.problem)
                with suppress(MeshError):
                    liveness.look(run, await queue.why_waiting(run.name))

    @property
    def _calm(self) -> bool:
        """Nothing has gone wrong for a while, and no update waits for responses that run."""
        now = self.loop.time() - START_S
        recent = any(each.at_s < now < each.at_s + each.seconds + CALM_S for each in self._faults)
        return not (recent or self._ending or self.shape.on_update is OnUpdate.DRAIN)

    @property
    def _served(self) -> dict[str, Version]:
        """Versions served by the engines of live processes, by service."""
        engines = self._services.weights.engines
        lives = {name: engines.get(life.process) for name, life in self._lives.items()}
        return {name: engine.version for name, engine in lives.items() if engine is not None}

    async def _name_the_culprit(self, since: float) -> None:
        """The run has not ended although nothing fails: `why_waiting` must say who blocks."""
        waits: list[str] = []
        if (queue := self._services.queue) is not None:
            with suppress(MeshError):
                found = await queue.why_waiting(RUN)
                waits = [f"{w.who}: {w.what}, {w.since_s:.0f} s, {w.owners}" for w in found]
        self.problem(f"not trained {PATIENCE_S:.0f} s after the last fault at {since:.0f} s")
        for wait in waits[:8]:
            self.note(f"why_waiting: {wait}")
        if not waits:
            self.problem("and why_waiting names nothing")

    async def _end(self) -> None:
        """Drain the services in the launcher's order, the queue last."""
        self._ending = True
        self._clear_weather()
        names = [name for name in self._lives if not name.startswith(("queue", "trainer"))]
        for part in (names, ["queue"]):
            living = [self._lives[n] for n in part if not self._lives[n].over.is_set()]
            for incarnation in living:
                self._drain(incarnation)
            try:
                async with asyncio.timeout(DRAIN_S):
                    for incarnation in living:
                        await incarnation.over.wait()
            except TimeoutError:
                late = [i.process.name for i in living if not i.over.is_set()]
                self.problem(f"did not drain within {DRAIN_S:.0f} s: {', '.join(late)}")
            await asyncio.sleep(1.0)
            for run in queue.open_runs if (queue := self._services.queue) else ():
                check_idle(run, self.problem)

    def _clear_weather(self) -> None:
        """Nothing goes wrong any more."""
        for name in self.shape.services:
            weather = self._services.network.weather(name)
            weather.break_requests_until = weather.break_answers_until = 0.0
            weather.late_requests_until = weather.slow_until = 0.0
        self._services.disk.full_until = self._services.disk.failing_until = 0.0

    async def _check_the_end(self) -> None:
        """Compare the disk with the weights."""
        for incarnation in self._lives.values():
            incarnation.process.kill()
        self._services.weights.check_end()
        store = self._services.disk.open()
        await store.load()
        found = await audit(store.export())
        for problem in found.problems:
            self.problem(f"audit: {problem}")
        weights = self._services.trained_on
        if weights is None:
            return
        if RUN not in found.ledgers:
            self.problem("the store has no run")
            return
        shape = self.shape
        fed = shape.prompts * shape.epochs * shape.group
        ledger = found.ledgers[RUN]
        check_history(shape.spec, fed, ledger, weights, self.problem)
        dead = sum(ledger.dead_lettered.values())
        for lost in self._given_up:
            if not shape.batch * shape.group <= lost <= dead:
                self.problem(f"a trainer gave up for {lost} dead letters; there are {dead}")


def _first(error: BaseException) -> BaseException:
    return _first(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error


def simulate(
    seed: int,
    *,
    shape: Shape | None = None,
    faults: Sequence[Fault] | None = None,
    parts: Parts | None = None,
    trace: bool = False,
) -> Report:
    """One run. What is not given, the seed draws."""
    shape = shape or draw_shape(seed)
    if faults is None:
        faults = draw_faults(
            seed, shape.services, until_s=shape.faults_until_s, most=shape.most_faults
        )
    with quiet():
        return Mesh(seed, shape, faults, parts=parts, trace=trace).run()
