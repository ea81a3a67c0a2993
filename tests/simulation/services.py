"""The services of a simulated mesh: what each of its processes runs, on one network, one disk and one weight plane.

    feeder ──▶ queue ◀──▶ rollout-0 … ◀══ versions ══╗
                 ▲  ▲                                ║
                 │  └──▶ reward-0 …                  ║
                 └─────▶ trainer (rank 0) ═══════════╝   trainer-1 …

Each `serve_…` is the main function of a process, as the launcher's services are: it makes clients and the room's
worker, runs until its work is done or it is drained, and closes what it opened.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, cast

import numpy as np
import torch

from meshrl.contract.ports import Queue
from meshrl.contract.stage_worker import Intake
from meshrl.contract.types import SamplingParams, Task, Version
from meshrl.http.gateway.sessions import SessionTable
from meshrl.rewardd.reward_stage import RewardStage
from meshrl.rollout.config import CheckpointIntervals, RowSchedule
from meshrl.rollout.containers.pool import Pool
from meshrl.rollout.programs import ProgramCache
from meshrl.rollout.worker import RolloutWorker
from meshrl.rpc.clients.base import Patience
from meshrl.rpc.clients.queue import QueueClient
from meshrl.rpc.servicers import QueueServicer
from meshrl.trainer.checkpoint.resume import resume
from meshrl.trainer.config import FilterGroupsConfig, TrainerConfig
from meshrl.trainer.data.feeder import Feeder, PromptOrder
from meshrl.trainer.data.prompts import Prompt, PromptSet
from meshrl.trainer.learner.learner import Learner
from meshrl.trainer.loop.context import RunContext, TrainerSettings
from meshrl.trainer.loop.loop import Trainer
from meshrl.trainer.ranks.world import Compute
from meshrl.trainer.reference.stage import ReferenceStage
from meshrl.transferqueue.queue import TransferQueue
from meshrl.weights.carriers import shm
from meshrl.weights.coordinator import WeightCoordinator
from meshrl.weights.replica_controller import ReplicaController, ServedEngine
from meshrl.weights.servicer import WeightsServicer
from tests.simulation.agents import Agent, gateway_address, gateway_app
from tests.simulation.call import connect
from tests.simulation.checks import RowHistory, WatchedQueue
from tests.simulation.containers import InContainer, SimulatedBackend
from tests.simulation.conversations import (
    OPTIONS,
    ChatTokenizer,
    CheckedConversations,
)
from tests.simulation.disk import CheckpointDisk, Disk, SimulatedCheckpoints
from tests.simulation.engine import SimulatedEngine
from tests.simulation.host import Takes
from tests.simulation.loop import Process, SimulatedLoop
from tests.simulation.network import Network
from tests.simulation.renewer import SimulatedRenewer
from tests.simulation.shape import RUN, Shape
from tests.simulation.stand_ins import (
    Collectives,
    PostedFirst,
    StandInJudge,
    StandInLearner,
    StandInReference,
    StandInWorld,
    Tokenizer,
    TrainedRow,
)
from tests.simulation.weights import DRAIN_S, SimulatedSource, WeightSurroundings

TRAINER: Final = "trainer:7002"
NOWHERE: Final = Path("simulated")


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The product's classes. A planted bug is a subclass in one of these places."""

    queue: type[TransferQueue] = TransferQueue
    client: type[QueueClient] = QueueClient
    worker: type[RolloutWorker] = RolloutWorker
    sessions: type[SessionTable] = SessionTable
    reward: type[RewardStage] = RewardStage
    reference: type[ReferenceStage] = ReferenceStage
    feeder: type[Feeder] = Feeder
    trainer: type[Trainer] = Trainer
    servicer: type[QueueServicer] = QueueServicer
    engine: type[SimulatedEngine] = SimulatedEngine
    renewer: type[SimulatedRenewer] = SimulatedRenewer
    checkpoints: type[SimulatedCheckpoints] = SimulatedCheckpoints
    coordinator: type[WeightCoordinator] = WeightCoordinator
    controller: type[ReplicaController] = ReplicaController
    shm: type[shm.Carrier] = shm.Carrier
    pool: type[Pool] = Pool


@dataclass(slots=True, eq=False)
class Incarnation:
    """One life of a service."""

    process: Process
    over: asyncio.Event
    error: BaseException | None = None
    ended: bool = False
    """Whether it returned or raised, and was not killed."""
    drain: Callable[[], object] | None = None


Main = Callable[[Incarnation], Coroutine[Any, Any, None]]


class Services:
    """The objects that the processes of one run share, and their main functions."""

    def __init__(
        self,
        seed: int,
        loop: SimulatedLoop,
        shape: Shape,
        parts: Parts,
        *,
        note: Callable[[str], None],
        problem: Callable[[str], None],
    ) -> None:
        """Nothing runs yet; `note` and `problem` hear of what happens."""
        self.shape = shape
        self.network = Network(loop, seed, shape.delays)
        self._connect = partial(connect, self.network)
        self.disk = Disk(seed)
        """The queue's."""
        self.weights = WeightSurroundings(loop, shape, self._takes, problem, shm=parts.shm)
        self.history = RowHistory(problem)
        self.random = random.Random(f"mesh {seed}")
        self.queue: TransferQueue | None = None
        """The one that listens."""
        self.judges: dict[str, StandInJudge] = {}
        self.trained_on: list[TrainedRow] | None = None
        """The weights of a trainer that has trained to the end."""
        self.done = asyncio.Event()
        """One has."""
        self._conversations = CheckedConversations(shape.program, problem)
        self._seed = seed
        self._loop = loop
        self._parts = parts
        self._note = note
        self._problem = problem
        self._checkpoints = CheckpointDisk()
        self._trainers = 0

    @asynccontextmanager
    async def _client(self, patience: Patience | None = None) -> AsyncIterator[Queue]:
        async with self._parts.client(
            _address("queue"),
            connect=self._connect,
            renewer=partial(self._parts.renewer, self._connect),
            patience=patience or Patience(),
        ) as queue:
            yield queue

    async def serve_queue(self, incarnation: Incarnation) -> None:
        """The queue."""
        # A mixin: the simulated class may be one with a planted bug.
        watched: type[WatchedQueue] = type("Queue", (WatchedQueue, self._parts.queue), {})
        queue = await watched.open(self.disk.open())
        queue.history = self.history
        stopping = asyncio.Event()
        incarnation.drain = stopping.set
        endpoint = self.network.listen(_address("queue"), [self._parts.servicer(queue)])
        self.queue = queue

        def gone() -> None:
            if self.queue is queue:
                self.queue = None

        incarnation.process.on_death[gone] = None
        await stopping.wait()
        queue.end_no_lease()
        await self.network.stop(endpoint)
        await queue.close()
        gone()

    async def feed(self, incarnation: Incarnation) -> None:
        """The feeder."""
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
                program=shape.program,
                deadline_s=shape.deadline_s,
            )

        async with self._client() as queue:
            await queue.open_run(shape.spec)
            feeder = self._parts.feeder(
                queue,
                RUN,
                prompts,
                task,
                epochs=shape.epochs,
                order=PromptOrder(shuffle=True, seed=self._seed),
                chunk=shape.chunk,
            )
            incarnation.drain = feeder.stop
            await feeder.run()
            state = await queue.run_state(RUN)
            if state.feed_closed:
                incarnation.drain = None  # done, not stopped

    async def roll_out(self, incarnation: Incarnation) -> None:
        """A rollout worker with its engine, and the replica controller beside it."""
        shape, name, weights = self.shape, incarnation.process.name, self.weights
        engine = self._parts.engine(
            self._seconds_of,
            slots=shape.slots,
            deltas=shape.deltas,
            loads=self._takes(shape.transfer_s / 2),
            serves=weights.served.add,
            problem=self._problem,
        )
        weights.join(engine)
        controller = self._parts.controller(
            weights.config,
            run=RUN,
            replica=name,
            engine=ServedEngine(engine, weights.config, on_update=shape.on_update, drain_s=DRAIN_S),
            transport=weights.transport(),
            connect=partial(self._connect, TRAINER),
        )
        async with AsyncExitStack() as stack:
            sessions: SessionTable | None = None
            if shape.agents:
                sessions = self._parts.sessions(prompt_tokens=None)
                await stack.enter_async_context(self._gateway(name, sessions))
            options = OPTIONS[shape.program]
            programs = ProgramCache(shape.program, options, gateway=sessions)
            if shape.boxes:
                backend = SimulatedBackend(self.random, self._problem)
                inner = programs.get(shape.program)
                held = InContainer(inner, shape.boxes, backend, self._parts.pool)
                programs._built[shape.program], programs.boxes = held, held.pool
            await stack.enter_async_context(programs)
            await programs.start()
            queue = await stack.enter_async_context(self._client())
            await queue.open_run(shape.spec)
            worker = self._parts.worker(
                queue,
                engine,
                ChatTokenizer() if options else Tokenizer(),
                runs=[RUN],
                worker=name,
                schedule=RowSchedule(
                    slots=shape.slots,
                    checkpoint=CheckpointIntervals(tokens=8, ms=500)
                    if shape.saves_progress
                    else None,
                    max_staleness=shape.max_staleness,
                ),
                programs=programs,
            )
            if sessions is not None:
                sessions.on_demand = worker.wake

            def drain() -> None:
                worker.drain()
                if sessions is not None:
                    sessions.drain()

            incarnation.drain = drain
            try:
                await _until_one_ends(
                    worker.run(grace_s=10.0, serving=controller.serving), controller.run()
                )
            finally:
                await engine.close()

    @asynccontextmanager
    async def _gateway(self, worker: str, sessions: SessionTable) -> AsyncIterator[None]:
        """The gateway of a rollout worker, which listens before its worker is made, as in the product."""
        address = gateway_address(worker)
        sessions.url = f"http://{address}"
        endpoint = self.network.listen(address, [gateway_app(sessions, self._problem)])
        try:
            yield
        finally:
            sessions.drain()
            await self.network.stop(endpoint)

    async def score(self, incarnation: Incarnation) -> None:
        """A reward stage."""
        judge = StandInJudge(self._seed, self.shape.reward_s)
        self.judges[incarnation.process.name] = judge
        async with self._client() as queue:
            await queue.open_run(self.shape.spec)
            stage = self._parts.reward(
                queue,
                [RUN],
                PostedFirst(judge),
                worker=incarnation.process.name,
                intake=Intake(limit=256, per_call=4),
            )
            incarnation.drain = stage.drain
            await stage.run(grace_s=10.0)

    async def refer(self, incarnation: Incarnation) -> None:
        """A reference stage."""
        model = StandInReference(self._takes(self.shape.reward_s))
        async with self._client() as queue:
            await queue.open_run(self.shape.spec)
            name = incarnation.process.name
            stage = self._parts.reference(queue, [RUN], model.judged, worker=name)
            incarnation.drain = stage.drain
            await stage.run(grace_s=10.0)

    async def lead(self, incarnation: Incarnation) -> None:
        """An external agent."""
        workers = [f"rollout-{number}" for number in range(self.shape.workers)]
        agent = Agent(self.network, workers, self.random, self._conversations)
        incarnation.drain = agent.stop
        await agent.run()

    async def train(self, collectives: Collectives, rank: int, incarnation: Incarnation) -> None:
        """One rank of the trainer; rank 0 has the weight coordinator."""
        shape = self.shape
        world = StandInWorld(collectives, rank)
        self._trainers += 1
        settings = TrainerSettings(
            run=RUN,
            directory=NOWHERE,
            owner=f"trainer {self._trainers}",
            seed=0,
            trainer=TrainerConfig(save_freq=shape.save_freq, take_wait_s=10.0),
            tokenizer=NOWHERE,
            batch_groups=shape.batch,
            group_size=shape.group,
            filter_groups=FilterGroupsConfig(enable=shape.filter_groups, max_num_gen_batches=0),
            total_steps=None,
        )
        learner = StandInLearner(
            world,
            self._takes(shape.train_s),
            self._problem,
            max_staleness=shape.max_staleness,
            reference=shape.references > 0,
            check=self._conversations,
        )
        checkpoints = self._parts.checkpoints(self._checkpoints, self._takes(shape.checkpoint_s))
        patience = Patience()
        async with AsyncExitStack() as stack:
            queue = await stack.enter_async_context(self._client(patience))
            await queue.open_run(shape.spec)
            context = RunContext(
                settings=settings,
                queue=queue,
                learner=cast(Learner, learner),
                compute=Compute(torch.device("cpu")),
                checkpoints=checkpoints,
                snapshot=_snapshot,
                export=lambda *_, **__: None,
            )
            state = await resume(context)
            self._note(f"{incarnation.process.name} begins at {state.epoch}:{state.step}")
            coordinator = self._coordinator(queue, state.epoch)
            if world.is_main:
                endpoint = self.network.listen(TRAINER, [WeightsServicer(coordinator)])
                stack.push_async_callback(self.network.stop, endpoint)
                await stack.enter_async_context(coordinator)
            trainer = self._parts.trainer(context, state, coordinator)
            drained = False

            def drain() -> None:
                nonlocal drained
                drained = True
                trainer.drain()
                patience.stop_waiting()

            incarnation.drain = drain if world.is_main else patience.stop_waiting
            await trainer.run()
        if world.is_main and not drained:
            self._finished(trainer.step, learner.policy.trained_on)

    def _finished(self, steps: int, trained_on: list[TrainedRow]) -> None:
        # One that took the run over after its end has trained on nothing more.
        if self.done.is_set() and trained_on != self.trained_on:
            self._problem("two trainers have finished the run with other weights")
        self.trained_on = trained_on
        self._note(f"trained to the end: {steps} steps, {len(trained_on)} rows")
        self.done.set()

    def _coordinator(self, queue: Queue, epoch: int) -> WeightCoordinator:
        async def publish(version: Version) -> None:
            self.weights.committed(version)
            await queue.publish(RUN, version)

        return self._parts.coordinator(
            self.weights.config,
            run=RUN,
            epoch=epoch,
            transport=self.weights.transport(),
            on_committed=publish,
        )

    def _takes(self, mean_s: float) -> Takes:
        """Something that takes a while in another thread."""

        def begin() -> asyncio.Future[None]:
            done: asyncio.Future[None] = self._loop.create_future()
            seconds = self.random.uniform(0.5, 1.5) * mean_s
            self._loop.call_later(seconds, done.set_result, None)
            return done

        return begin

    def _seconds_of(self, request_id: str) -> float:
        """How long the response of a row takes: it belongs to the row, and a few take long."""
        shape = self.shape
        task = request_id.split("/")[1]
        if shape.slow_prompt_s and task == "0-0":
            return shape.slow_prompt_s
        draw = random.Random(f"{self._seed} {request_id}")
        return min(shape.response_s * draw.paretovariate(1.5) / 3.0, 20 * shape.response_s)


async def _until_one_ends(*services: Coroutine[Any, Any, None]) -> None:
    """Run both until the first ends, and end the others."""
    tasks = [asyncio.create_task(service) for service in services]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for ended in done:
            ended.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _address(name: str) -> str:
    """The address of a queue process."""
    return f"{name}:7001"


def _snapshot(policy: object, world: Any, *, version: Version, **_: object) -> Any:
    """Stand-in for `take_snapshot`: on rank 0 the version, None on the others."""
    return SimulatedSource(version) if world.is_main else None
