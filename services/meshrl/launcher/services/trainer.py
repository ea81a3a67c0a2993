"""The trainer service: the loop, the weight coordinator beside it, servicers for both.

    queue ◀──take, settle── Trainer ──publish──▶ WeightCoordinator ◀──Join── rollout workers
                              ▲                       └──publish(version)──▶ queue, once the fleet has committed
                         TrainerServicer (Watch, Stop)  WeightsServicer

Every rank learns; rank 0 alone has servicers, a weight coordinator and an evaluator.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, closing, nullcontext
from functools import partial

from meshrl.common import tracing
from meshrl.common.device_lease import DeviceLease
from meshrl.config.recipe import (
    Recipe,
    algorithm_needs,
    group_rows,
    has_evaluation,
)
from meshrl.config.stages import eval_spec
from meshrl.contract.ports import Queue
from meshrl.images import reads_images
from meshrl.launcher.learner import build_learner, training_steps
from meshrl.launcher.prompts import eval_tasks
from meshrl.launcher.ranks import refuse_open
from meshrl.launcher.stage_service import lease_device, open_run, open_runs, work_until_stopped
from meshrl.rpc.clients.base import Patience
from meshrl.rpc.clients.services import JudgeClient
from meshrl.rpc.exit_codes import Exit
from meshrl.rpc.queue_connection import connect_mesh_queue
from meshrl.rpc.runtime import GrpcServer, ServiceContext, Servicer
from meshrl.rpc.servicers import TrainerCollector, TrainerServicer
from meshrl.trainer.checkpoint.checkpoint import TrainerState
from meshrl.trainer.checkpoint.resume import require_shared, resume
from meshrl.trainer.loggers._types import LoggedRun, flat
from meshrl.trainer.loop.context import RunContext, TrainerSettings
from meshrl.trainer.loop.evaluation import Evaluator
from meshrl.trainer.loop.loop import Trainer
from meshrl.trainer.loop.reward_guard import RewardVersionGuard
from meshrl.trainer.loop.time_slices import TimeSlices
from meshrl.trainer.metrics.log import MetricsLog, open_loggers
from meshrl.trainer.ranks.world import Compute, World
from meshrl.trainer.trajectories.files import FOLDER
from meshrl.trainer.trajectories.log import TrajectoryLog
from meshrl.weights.carrier import RunPaths
from meshrl.weights.coordinator import WeightCoordinator
from meshrl.weights.servicer import WeightsServicer
from meshrl.weights.transport import load_transport

LAST_WORD_S = 0.5
"""How long the server answers after the end, so that watchers learn of it."""
TURN_WAIT_S = 900.0
"""How long engines may take to give a shared GPU up; then the trainer ends with their pids."""


async def run(recipe: Recipe, context: ServiceContext) -> None:
    """Train in this process, as the only rank or as one of several, until the end of the run or stopped; then save.

    Raises:
        UserError: weights or gradients would be open to others without permission.
    """
    refuse_open(recipe, context.settings)
    with closing(lease_device(recipe)) if recipe.takes_turns else nullcontext() as lease:
        if lease is not None:
            await lease.acquire(TURN_WAIT_S)
        await _train(recipe, context, lease)


async def _train(recipe: Recipe, context: ServiceContext, lease: DeviceLease | None) -> None:
    """One rank; `lease` is of a device that engines use too, and this process has it.

    Raises:
        SystemExit: drained before the run was done: the supervisor is to start it again.
    """
    world = World.start(
        recipe.trainer.device, recipe.parallel, peer_timeout_s=recipe.trainer.peer_timeout_s
    )
    if not world.is_main:
        tracing.stop()  # rank 0 tells of the step
    compute = Compute(world.device)
    try:
        patience = Patience()
        async with connect_mesh_queue(recipe, context, patience) as queue:
            await open_runs(queue, recipe)
            setting = await asyncio.to_thread(_setting, recipe, context)
            await compute.run(partial(require_shared, world, setting.checkpoints))
            learner = await compute.run(partial(build_learner, recipe, setting.total_steps, world))
            parts = RunContext(settings=setting, queue=queue, learner=learner, compute=compute)
            state = await resume(parts)
            if world.is_main:
                turns = None
                if lease is not None:
                    turns = TimeSlices(lease, learner, compute, wait_s=TURN_WAIT_S)
                trainer = await _lead(recipe, context, parts, state, patience, turns=turns)
                if world.peers is not None:
                    await asyncio.to_thread(world.peers.finish)
            else:
                rewards = _rewards(recipe, queue, None)
                trainer = Trainer(parts, state, _Mute(), rewards=rewards)
                await _follow(trainer, patience)
                if world.peers is not None:
                    await asyncio.to_thread(world.peers.until_finished)
    finally:
        compute.close()
        world.close()
    if trainer.drained:
        raise SystemExit(Exit.DRAINED)


async def _lead(
    recipe: Recipe,
    context: ServiceContext,
    parts: RunContext,
    state: TrainerState,
    patience: Patience,
    *,
    turns: TimeSlices | None,
) -> Trainer:
    """Rank 0: train, and answer calls meanwhile."""
    setting, queue = parts.settings, parts.queue
    plane = WeightCoordinator(
        recipe.weights,
        run=setting.run,
        epoch=state.epoch,
        transport=load_transport(
            recipe.weights, RunPaths(directory=recipe.run.path, model_path=recipe.model.path)
        ),
        on_committed=partial(queue.publish, setting.run),
    )
    async with AsyncExitStack() as stack:
        metrics, trajectories = await stack.enter_async_context(open_logs(recipe, state.step))
        judge = None
        if "reward" in context.addresses:
            judge = JudgeClient(context.addresses["reward"])
            stack.push_async_callback(judge.close)
        trainer = Trainer(
            parts,
            state,
            plane,
            evaluator=await _evaluator(recipe, setting, queue, trajectories),
            metrics=metrics,
            trajectories=trajectories,
            rewards=_rewards(recipe, queue, judge),
            turns=turns,
        )

        def drain() -> None:
            trainer.drain()
            patience.stop_waiting()  # the queue may be stopped at the same moment

        servicers: list[Servicer] = [TrainerServicer(trainer.status), WeightsServicer(plane)]
        async with GrpcServer(context.settings, servicers) as server, plane:
            server.registry.register(TrainerCollector(setting.run, trainer.status.status))
            await server.ready()
            await work_until_stopped(server, trainer.run(), drain)
            await asyncio.sleep(LAST_WORD_S)
    return trainer


@asynccontextmanager
async def open_logs(recipe: Recipe, step: int) -> AsyncIterator[tuple[MetricsLog, TrajectoryLog]]:
    """The logs of a run from `step` on, closed at the end, however that comes: rows first, which loggers get too.

    Raises:
        UserError, ConfigError: a logger cannot be opened.
    """
    logged = LoggedRun(
        directory=recipe.run.path,
        project=recipe.trainer.project_name,
        name=recipe.trainer.experiment_name or recipe.run.name,
        settings=flat(recipe.model_dump(mode="json")),
        step=step,
    )
    async with AsyncExitStack() as stack:
        loggers = open_loggers(recipe.trainer.logger, logged)
        metrics = stack.enter_context(closing(MetricsLog(recipe.metrics_path, loggers)))
        trajectories = TrajectoryLog(
            recipe.run.path / FOLDER,
            share=recipe.trainer.log_share,
            max_bytes=recipe.trainer.log_bytes,
            tokenizer=recipe.tokenizer_dir,
            keeps_inputs=recipe.reward.mixed_versions == "rescore",
            pictures=reads_images(recipe.model.path),
            on_rows=metrics.rows,
        )
        stack.push_async_callback(asyncio.to_thread, trajectories.close)
        yield metrics, trajectories


def _rewards(recipe: Recipe, queue: Queue, judge: JudgeClient | None) -> RewardVersionGuard | None:
    """A guard that makes each batch one of a single reward version, unless the recipe lets them mix."""
    if recipe.reward.mixed_versions != "rescore":
        return None
    return RewardVersionGuard(queue, judge, token_rewards=recipe.reward.token_rewards)


async def _follow(trainer: Trainer, patience: Patience) -> None:
    """Another rank: rank 0 says what to do next, also when to end; a signal to all is for rank 0 to answer.

    Here it only means that the queue is not waited for much longer.
    """
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, patience.stop_waiting)
    await trainer.run()


class _Mute:
    """The publisher of a rank that publishes nothing: rank 0 does."""

    async def publish(self, source: object) -> None:
        """Do nothing: rank 0 publishes."""

    async def drained(self) -> None:
        """Return at once: this rank transfers nothing."""


async def _evaluator(
    recipe: Recipe, setting: TrainerSettings, queue: Queue, trajectories: TrajectoryLog
) -> Evaluator | None:
    if not has_evaluation(recipe):
        return None
    spec = eval_spec(recipe)
    await open_run(queue, spec, recipe)
    tasks = await asyncio.to_thread(eval_tasks, recipe)
    return Evaluator(
        queue,
        spec,
        tasks,
        owner=setting.owner,
        take_wait_s=recipe.trainer.take_wait_s,
        trajectories=trajectories,
        curriculum=gym if (gym := recipe.data.reasoning_gym) and gym.curriculum else None,
    )


def _setting(recipe: Recipe, context: ServiceContext) -> TrainerSettings:
    directory = recipe.run.path
    return TrainerSettings(
        run=recipe.run.name,
        directory=directory,
        owner=f"{context.name} (pid {os.getpid()} on {socket.gethostname()})",
        seed=recipe.run.seed,
        trainer=recipe.trainer,
        tokenizer=recipe.tokenizer_dir,
        batch_groups=recipe.data.train_batch_size,
        group_size=group_rows(recipe),
        extra_rows=algorithm_needs(recipe).extra_rows,
        filter_groups=recipe.algorithm.filter_groups,
        total_steps=training_steps(recipe),
        weight_dtype=recipe.weights.dtype,
        bucket_bytes=recipe.weights.bucket_bytes,
        adapters_only=True,
        blocking_evaluation=recipe.queue.max_staleness == 0,
    )
