"""The feeder service: prompts from files, admitted as fast as the queue has room. It ends when all are in."""

from __future__ import annotations

import asyncio

from meshrl.config.recipe import EVAL_SUFFIX, Recipe, train_sampling
from meshrl.config.run_record import changes_accepted, mark_fed
from meshrl.config.stages import train_spec
from meshrl.launcher.prompts import read_prompts
from meshrl.launcher.stage_service import open_runs, work_until_stopped
from meshrl.rpc.queue_connection import connect_mesh_queue
from meshrl.rpc.runtime import GrpcServer, ServiceContext
from meshrl.trainer.data.feeder import Feeder, PromptOrder
from meshrl.trainer.data.prompt_streams import LevelStream
from meshrl.trainer.data.prompts import PromptSet, task_maker


async def run(recipe: Recipe, context: ServiceContext) -> None:
    """Feed until stopped or done. A number of steps outranks a number of epochs: then prompts never end."""
    prompts = await asyncio.to_thread(read_prompts, recipe)
    spec = train_spec(recipe)
    make_task = task_maker(
        spec.run,
        group_size=spec.group_size,
        sampling=train_sampling(recipe),
        program=recipe.rollout.program,
        deadline_s=recipe.rollout.deadline_s,
    )
    async with (
        connect_mesh_queue(recipe, context) as queue,
        GrpcServer(context.settings, []) as server,
    ):
        await open_runs(queue, recipe)
        feeder = Feeder(
            queue,
            spec.run,
            prompts,
            make_task,
            epochs=None if recipe.trainer.total_training_steps else recipe.trainer.total_epochs,
            order=PromptOrder(
                shuffle=recipe.data.shuffle,
                seed=recipe.data.seed,
                curriculum=recipe.data.curriculum,
                weights=recipe.data.weights,
                levels=_levels(recipe, prompts),
            ),
            accept_changes=context.accept_changes or changes_accepted(recipe.run.path),
        )
        mark_fed(recipe.run.path)
        await server.ready()
        await work_until_stopped(server, feeder.run(), feeder.stop)


def _levels(recipe: Recipe, prompts: PromptSet) -> LevelStream | None:
    gym = recipe.data.reasoning_gym
    if gym is None or gym.curriculum is None:
        return None
    return LevelStream(
        prompts.prompts,
        gym,
        evaluation=recipe.run.name + EVAL_SUFFIX,
        batch=recipe.data.train_batch_size,
        seed=recipe.data.seed,
    )
