"""One run of a whole mesh: services of the product on a simulated network and disk, a supervisor, faults, checks.

    feeder ──▶ queue ◀──▶ rollout-0 … ◀── versions ──┐
                 ▲  ▲                                │
                 │  └──▶ reward-0 …                  │
                 └─────▶ trainer (rank 0), trainer-1 … ─┘

Everything between the boxes is the product's: clients, codec, interceptors, servicers, queue, stage worker, rollout
worker, reward stage, feeder, trainer's loop. A run ends when the trainer has trained on everything, the workers have
drained and the queue has closed.
"""

from __future__ import annotations

import asyncio
import random
import traceback
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, cast

import numpy as np
import torch

from meshrl.contract.errors import (
    CapacityError,
    FencedError,
    InfraError,
    MeshError,
    UnavailableError,
    WaitTimeoutError,
)
from meshrl.contract.ports import HeartbeatQueue
from meshrl.contract.types import SamplingParams, Task, Uid
from meshrl.rewardd.reward_stage import RewardStage
from meshrl.rollout.config import CheckpointIntervals
from meshrl.rollout.worker import RolloutWorker
from meshrl.rpc.clients.disk_full import DiskFullPolicy
from meshrl.rpc.clients.queue import QueueClient
from meshrl.rpc.servicers.queue import QueueServicer
from meshrl.simulation.checks import (
    Liveness,
    RowHistory,
    WatchedQueue,
    check_history,
    check_resident,
)
from meshrl.simulation.disk import CheckpointDisk, Disk, SimulatedCheckpoints
from meshrl.simulation.faults import Fault, Kind, draw_faults
from meshrl.simulation.loop import (
    PROCESS,
    START_S,
    DeadlockError,
    Process,
    SimulatedLoop,
    quiet,
    spawn,
)
from meshrl.simulation.network import Network
from meshrl.simulation.renewer import SimulatedRenewer
from meshrl.simulation.shape import RUN, Shape, draw_shape
from meshrl.simulation.stand_ins import (
    Collectives,
    Fleet,
    PacedEngine,
    StandInJudge,
    StandInLearner,
    StandInPublisher,
    StandInSnapshot,
    StandInWorld,
    Tokenizer,
    TrainedRow,
)
from meshrl.trainer.checkpoint.resume import resume
from meshrl.trainer.compute import Compute
from meshrl.trainer.config import FilterGroupsConfig, TrainerConfig
from meshrl.trainer.data.feeder import Feeder
from meshrl.trainer.data.prompts import Prompt, PromptSet
from meshrl.trainer.learner.learner import Learner
from meshrl.trainer.loop import Trainer
from meshrl.trainer.settings import TrainerSettings
from meshrl.transferqueue.operations.audit import audit
from meshrl.transferqueue.queue import TransferQueue

ADDRESS: Final = "queue:7001"
NOWHERE: Final = Path("simulated")
CHECK_EVERY_S: Final = 2.0
REJOIN_S: Final = 2.0
"""How often an engine that was out of reach asks for the fleet's version."""
DRAIN_S: Final = 120.0
"""How long a service may take to drain at the end."""
PATIENCE_S: Final = 3000.0
"""After the last fault everything must be trained within so many seconds."""
EXPECTED: Final = (UnavailableError, FencedError, InfraError, WaitTimeoutError, CapacityError)
"""Errors with which a service may end: the supervisor starts it again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The product's classes. A planted bug is a subclass in one of these places."""

    queue: type[TransferQueue] = TransferQueue
    client: type[QueueClient] = QueueClient
    worker: type[RolloutWorker] = RolloutWorker
    reward: type[RewardStage] = RewardStage
    feeder: type[Feeder] = Feeder
    trainer: type[Trainer] = Trainer
    servicer: type[QueueServicer] = QueueServicer
    engine: type[PacedEngine] = PacedEngine
    renewer: type[SimulatedRenewer] = SimulatedRenewer
    checkpoints: type[SimulatedCheckpoints] = SimulatedCheckpoints


@dataclass(slots=True, kw_only=True)
class Report:
    """What came of one run."""

    seed: int
    problems: list[str]
    log: list[str]
    """What happened, line by line."""
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


@dataclass(slots=True, eq=False)
class Incarnation:
    """One life of a service."""

    process: Process
    over: asyncio.Event
    error: BaseException | None = None
    ended: bool = False
    """It returned or raised: nobody killed it."""
    drain: Callable[[], object] | None = None


Main = Callable[[Incarnation], Coroutine[Any, Any, None]]


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
        self.history = RowHistory(self.problem)
        self._seed = seed
        self._faults = faults
        self._parts = parts or Parts()
        self._network = Network(self.loop, seed, shape.delays)
        self._disk = Disk(seed)
        self._checkpoints = CheckpointDisk()
        self._fleet = Fleet(self._silent)
        self._random = random.Random(f"mesh {seed}")
        self._services: dict[str, Incarnation] = {}
        self._queue: TransferQueue | None = None
        self._judges: dict[str, StandInJudge] = {}
        self._weights: list[TrainedRow] | None = None
        self._done = asyncio.Event()
        self._ending = False
        self._epochs = 0

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
                calls=self._network.made,
                virtual_s=self.loop.time() - START_S,
                trace_hash=self.loop.trace_hash,
                samplings=self.history.sampled,
                trained=len(self._weights or ()),
            )
            self.loop.close()
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
        supervise = self._supervise
        watching = [
            supervise("queue", self._serve_queue),
            supervise("feeder", self._feed, finite=True),
            *(supervise(f"rollout-{n}", self._roll_out) for n in range(self.shape.workers)),
            *(supervise(f"reward-{n}", self._score) for n in range(self.shape.rewards)),
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
                await self._done.wait()
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

        self._services[name] = incarnation
        self.note(f"{name} starts")
        spawn(self.loop, process, live(), name)
        return incarnation

    async def _supervise(self, name: str, main: Main, *, finite: bool = False) -> None:
        """Start a service again whenever it ends; a finite one until it is done."""
        while not self._ending:
            incarnation = self._start(name, main)
            await incarnation.over.wait()
            finished = incarnation.ended and incarnation.error is None
            self._judge_end(name, incarnation)
            if finished and finite and incarnation.drain is None:
                return
            await asyncio.sleep(self._random.uniform(0.1, 2.0))

    def _judge_end(self, name: str, incarnation: Incarnation) -> None:
        error = incarnation.error
        if error is not None and not isinstance(error, EXPECTED):
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
            collectives = Collectives(self.loop, self.shape.ranks)
            ranks = [
                self._start(
                    f"trainer-{rank}" if rank else "trainer",
                    partial(self._train, collectives, rank),
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
            if self._done.is_set():
                return
            await asyncio.sleep(self._random.uniform(0.2, 4.0))

    def _is_zombie(self, rank: Incarnation) -> bool:
        """Counts as dead and lives."""
        return rank.over.is_set() and not rank.ended and not rank.process.dead

    @asynccontextmanager
    async def _client(self) -> AsyncIterator[QueueClient]:
        client = self._parts.client(
            ADDRESS,
            connect=self._network.connect,
            renewer=partial(self._parts.renewer, self._network.connect),
            disk_full=DiskFullPolicy(),
        )
        async with client:
            yield client

    async def _serve_queue(self, incarnation: Incarnation) -> None:
        queue = await self._parts.queue.open(self._disk.open())
        stopping = asyncio.Event()
        incarnation.drain = stopping.set
        watched = cast(HeartbeatQueue, WatchedQueue(queue, self.history))
        self._network.listen(ADDRESS, [self._parts.servicer(watched)])
        self._queue = queue

        def gone() -> None:
            if self._queue is queue:
                self._queue = None

        incarnation.process.on_death[gone] = None
        await stopping.wait()
        queue.end_no_lease()
        await self._network.stop(ADDRESS)
        await queue.close()
        gone()

    async def _feed(self, incarnation: Incarnation) -> None:
        shape = self.shape
        prompts = PromptSet(
            prompts=tuple(
                Prompt(index=n, prompt_ids=np.arange(1, 5, dtype=np.int32))
                for n in range(shape.prompts)
            ),
            skipped=0,
            fingerprint="simulated",
        )

        def task(prompt: Prompt, task_id: str) -> Task:
            return Task(
                run=RUN,
                task_id=task_id,
                prompt_ids=prompt.prompt_ids,
                group_size=shape.group,
                sampling=SamplingParams(max_tokens=shape.tokens),
            )

        async with self._client() as queue:
            await queue.open_run(shape.spec)
            feeder = self._parts.feeder(
                queue, RUN, prompts, task, epochs=shape.epochs, shuffle=True, seed=self._seed
            )

            incarnation.drain = feeder.stop
            await feeder.run()
            state = await queue.run_state(RUN)
            if state.feed_closed:
                incarnation.drain = None  # done, not stopped

    async def _roll_out(self, incarnation: Incarnation) -> None:
        shape, name = self.shape, incarnation.process.name
        engine = self._parts.engine(self._seconds_of, slots=shape.slots, deltas=shape.deltas)
        self._fleet.join(engine)

        async def serving() -> None:
            await engine.served.wait()

        async with self._client() as queue:
            await queue.open_run(shape.spec)
            worker = self._parts.worker(
                queue,
                engine,
                Tokenizer(),
                runs=[RUN],
                worker=name,
                slots=shape.slots,
                checkpoint=CheckpointIntervals(tokens=8, ms=500) if shape.saves_progress else None,
                max_staleness=shape.max_staleness,
                serving=serving,
            )
            incarnation.drain = worker.drain
            rejoining = asyncio.create_task(self._rejoin(engine), name="rejoin")
            try:
                await worker.run(grace_s=10.0)
            finally:
                rejoining.cancel()
                await asyncio.gather(rejoining, return_exceptions=True)
                await engine.close()
                self._fleet.leave()

    async def _rejoin(self, engine: PacedEngine) -> None:
        while True:
            if not self._silent(PROCESS.get()):
                engine.serve(self._fleet.committed)
            await asyncio.sleep(REJOIN_S)

    async def _score(self, incarnation: Incarnation) -> None:
        judge = StandInJudge(self._seed, self.shape.reward_s)
        self._judges[incarnation.process.name] = judge
        async with self._client() as queue:
            await queue.open_run(self.shape.spec)
            stage = self._parts.reward(
                queue, [RUN], judge, worker=incarnation.process.name, rows_per_call=4
            )
            incarnation.drain = stage.drain
            await stage.run(grace_s=10.0)

    async def _train(self, collectives: Collectives, rank: int, incarnation: Incarnation) -> None:
        shape = self.shape
        world = StandInWorld(collectives, rank)
        self._epochs += 1
        settings = TrainerSettings(
            run=RUN,
            directory=NOWHERE,
            owner=f"trainer {self._epochs}",
            seed=0,
            trainer=TrainerConfig(save_freq=shape.save_freq, take_wait_s=10.0),
            tokenizer=NOWHERE,
            batch_groups=shape.batch,
            group_size=shape.group,
            filter_groups=FilterGroupsConfig(enable=shape.filter_groups, max_num_gen_batches=0),
            total_steps=None,
        )
        learner = StandInLearner(
            world, self._takes(shape.train_s), self.problem, max_staleness=shape.max_staleness
        )
        checkpoints = self._parts.checkpoints(self._checkpoints, self._takes(shape.checkpoint_s))
        real = cast(Learner, learner)
        compute = Compute(torch.device("cpu"))
        async with self._client() as queue:
            await queue.open_run(shape.spec)
            state = await resume(settings, queue, real, compute, checkpoints=checkpoints)
            self.note(f"{incarnation.process.name} begins at {state.epoch}:{state.step}")
            publisher = StandInPublisher(
                self._fleet,
                lambda: self._random.expovariate(1 / shape.transfer_s),
                partial(queue.publish, RUN),
            )
            trainer = self._parts.trainer(
                settings,
                state,
                real,
                compute,
                queue,
                publisher,
                checkpoints=checkpoints,
                snapshot=lambda policy, world, *, version, **_: StandInSnapshot(version),
                export=lambda *_, **__: None,
            )
            drained = False

            def drain() -> None:
                nonlocal drained
                drained = True
                trainer.drain()

            if world.is_main:
                incarnation.drain = drain
            await trainer.run()
        if world.is_main and not drained:
            trained_on = learner.policy.trained_on
            # One that took the run over after its end has trained on nothing more.
            if self._done.is_set() and trained_on != self._weights:
                self.problem("two trainers have finished the run with other weights")
            self._weights = trained_on
            self.note(f"trained to the end: {trainer.step} steps, {len(self._weights)} rows")
            self._done.set()

    def _takes(self, mean_s: float) -> Callable[[], asyncio.Future[None]]:
        """Something that takes a while in another thread."""

        def begin() -> asyncio.Future[None]:
            done: asyncio.Future[None] = self.loop.create_future()
            seconds = self._random.uniform(0.5, 1.5) * mean_s
            self.loop.call_later(seconds, done.set_result, None)
            return done

        return begin

    def _seconds_of(self, request_id: str) -> float:
        """How long the response of a row takes: it belongs to the row, and a few take long."""
        shape = self.shape
        task = Uid.parse(request_id.partition("#")[0]).task
        if shape.slow_prompt_s and task == "0-0":
            return shape.slow_prompt_s
        draw = random.Random(f"{self._seed} {request_id}")
        return min(shape.response_s * draw.paretovariate(1.5) / 3.0, 20 * shape.response_s)

    def _silent(self, process: Process | None) -> bool:
        return self._network.silent_until(process) > self.loop.time()

    # --- faults

    async def _do_faults(self) -> None:
        for fault in self._faults:
            await asyncio.sleep(fault.at_s - (self.loop.time() - START_S))
            if self._done.is_set():
                return
            self.note(f"fault: {fault.kind} {fault.target} {fault.seconds:.2f} s")
            self._do(fault)

    def _do(self, fault: Fault) -> None:
        incarnation = self._services.get(fault.target)
        until = self.loop.time() + fault.seconds
        weather = self._network.weather(fault.target)
        match fault.kind:
            case Kind.KILL:
                if incarnation is not None:
                    incarnation.process.kill()
            case Kind.STOP:
                self._drain(incarnation)
            case Kind.CUT:
                self._network.cut(fault.target, fault.seconds)
            case Kind.ZOMBIE:
                self._network.cut(fault.target, fault.seconds)
                if incarnation is not None:
                    incarnation.over.set()
            case Kind.BREAK_REQUESTS:
                weather.break_requests_until = until
            case Kind.BREAK_ANSWERS:
                weather.break_answers_until = until
            case Kind.LATE_REQUESTS:
                weather.late_requests_until = until
            case Kind.SLOW:
                weather.slow_until = until
            case Kind.DISK_FULL:
                self._disk.full_until = until
            case Kind.COMMITS_FAIL:
                self._disk.failing_until = until
            case Kind.ENGINE_FAILS:
                for process, engine in self._fleet.engines.items():
                    if process.name == fault.target:
                        engine.failing_until = until
            case Kind.JUDGE_FAILS:
                if fault.target in self._judges:
                    self._judges[fault.target].failing_until = until

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
        liveness = Liveness(self.problem)
        while True:
            await asyncio.sleep(CHECK_EVERY_S)
            if self._queue is None:
                continue
            for run in self._queue.open_runs:
                check_resident(run, self.problem)
                with suppress(MeshError):
                    liveness.look(run, await self._queue.why_waiting(run.name))

    async def _name_the_culprit(self, since: float) -> None:
        """The run has not ended although nothing fails: `why_waiting` must say who blocks."""
        waits: Sequence[str] = []
        if self._queue is not None:
            with suppress(MeshError):
                found = await self._queue.why_waiting(RUN)
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
        names = [name for name in self._services if not name.startswith(("queue", "trainer"))]
        for part in (names, ["queue"]):
            living = [self._services[n] for n in part if not self._services[n].over.is_set()]
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

    def _clear_weather(self) -> None:
        for name in self.shape.services:
            weather = self._network.weather(name)
            weather.break_requests_until = weather.break_answers_until = 0.0
            weather.late_requests_until = weather.slow_until = 0.0
        self._disk.full_until = self._disk.failing_until = 0.0

    async def _check_the_end(self) -> None:
        """What the disk says, against what the weights say."""
        for incarnation in self._services.values():
            incarnation.process.kill()
        store = self._disk.open()
        await store.load()
        found = await audit(store.export())
        for problem in found.problems:
            self.problem(f"audit: {problem}")
        ledger = found.ledgers.get(RUN)
        if self._weights is None:
            return
        if ledger is None:
            self.problem("the store has no run")
            return
        shape = self.shape
        fed = shape.prompts * shape.epochs * shape.group
        check_history(shape.spec, fed, ledger, self._weights, self.problem)


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
