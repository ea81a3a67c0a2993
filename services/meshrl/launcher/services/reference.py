"""The reference service: log-probs of a frozen model, for algorithms with a KL term."""

from __future__ import annotations

import asyncio
import signal
from functools import partial

from meshrl.config.recipe import Recipe
from meshrl.launcher.stage_service import (
    STAGE_GRACE_S,
    find_runs,
    until_run_differs,
    work_until_stopped,
)
from meshrl.rpc.queue_connection import connect_mesh_queue
from meshrl.rpc.runtime import GrpcServer, ServiceContext
from meshrl.trainer.ranks.world import World
from meshrl.trainer.reference.model import ReferenceModel
from meshrl.trainer.reference.stage import ReferenceStage


async def run(recipe: Recipe, context: ServiceContext) -> None:
    """Add reference log-probs to rows until stopped."""
    config = recipe.reference
    deterministic = recipe.queue.max_staleness == 0
    world = World.start(recipe.trainer.device) if config.nproc > 1 else None
    model = await asyncio.to_thread(
        ReferenceModel,
        recipe.reference_model.path,
        param_dtype=recipe.model.param_dtype,
        max_tokens=config.max_tokens_per_batch,
        deterministic=deterministic,
        device=recipe.trainer.device,
        trust_remote_code=recipe.model.trust_remote_code,
        world=world,
    )
    if world is not None and not world.is_main:
        for number in (signal.SIGTERM, signal.SIGINT):  # they are for rank 0 to answer
            signal.signal(number, signal.SIG_IGN)
        model.follow()
        world.close()
        return
    try:
        async with (
            connect_mesh_queue(recipe, context) as queue,
            GrpcServer(context.settings, []) as server,
        ):
            await find_runs(queue, recipe)
            stage = ReferenceStage(
                queue,
                [recipe.run.name],
                partial(model.judged, top=recipe.algorithm.distillation.top_k),
                worker=context.name,
                together=not deterministic,
                pictures=model.reads_pictures,
            )
            await server.ready()
            beside = [until_run_differs(queue, recipe)]
            if world is not None:
                beside.append(model.keep_ranks())
            await work_until_stopped(server, stage.run(grace_s=STAGE_GRACE_S), stage.drain, *beside)
    finally:
        model.close()
        if world is not None:
            world.close()
