"""The rollout service, a process per replica: an engine, the worker that leases rows, the controller of its weights.

queue ◀──leases, writes── RolloutWorker ──▶ engine ◀── ReplicaController ◀──Join── trainer
                                              ▲                             ──reports──▶
                        RolloutServicer (GetStats)

Where the program is led by agents of other makes, a gateway is between them and the engine (meshrl.http.gateway).
"""

from __future__ import annotations

import contextlib
from contextlib import AsyncExitStack

from meshrl.config.recipe import Recipe
from meshrl.contract.errors import InfraError
from meshrl.http.gateway.serving import gateway_of
from meshrl.http.gateway.sessions import GatewayMetrics
from meshrl.launcher.prompts import image_processor
from meshrl.launcher.stage_service import (
    STAGE_GRACE_S,
    find_runs,
    lease_device,
    until_run_differs,
    work_until_stopped,
)
from meshrl.rollout.engines import build_engine
from meshrl.rollout.loop_watchdog import LoopWatchdog
from meshrl.rollout.programs import ProgramCache
from meshrl.rollout.time_slices import SleepingEngine, TimeSlicedEngine
from meshrl.rollout.tokenizer import load_tokenizer
from meshrl.rollout.worker import RolloutWorker
from meshrl.rpc import tls
from meshrl.rpc.queue_connection import connect_mesh_queue
from meshrl.rpc.runtime import GrpcServer, NoProgressError, ServiceContext
from meshrl.rpc.servicers import BoxCollector, EngineCollector, RolloutServicer
from meshrl.rpc.transport import CHANNEL_OPTIONS
from meshrl.weights.carrier import RunPaths
from meshrl.weights.fleet import ReplicaReport
from meshrl.weights.replica_controller import ReplicaController, ServedEngine
from meshrl.weights.transport import load_transport


async def run(recipe: Recipe, context: ServiceContext) -> None:
    """Serve until stopped; before the first committed version the engine answers no request."""
    trainer = context.address_of("trainer")
    tokenizer = load_tokenizer(
        recipe.tokenizer_dir,
        recipe.data.apply_chat_template_kwargs,
        image_processor(recipe),
    )
    engine = build_engine(recipe.rollout, model=recipe.model.path, tokenizer=tokenizer)
    async with AsyncExitStack() as stack:
        gateway = await stack.enter_async_context(
            gateway_of(recipe, tokenizer, context.settings, name=context.name)
        )
        programs = await stack.enter_async_context(
            ProgramCache(
                recipe.rollout.program,
                recipe.rollout.program_options,
                gateway=gateway,
                containers=recipe.rollout.containers,
            )
        )
        await programs.start()
        queue = await stack.enter_async_context(connect_mesh_queue(recipe, context))
        worker = RolloutWorker(
            queue,
            engine,
            tokenizer,
            runs=await find_runs(queue, recipe),
            worker=context.name,
            schedule=recipe.rollout.schedule(float(recipe.queue.max_staleness)),
            programs=programs,
            routed_experts=[recipe.run.name] if recipe.rollout.routing_replay else [],
        )

        if gateway is not None:
            gateway.on_demand = worker.wake
        if programs.boxes is not None:
            programs.boxes.wake = worker.wake

        def drain() -> None:
            worker.drain()
            if gateway is not None:
                gateway.drain()

        turns = None
        if recipe.takes_turns and isinstance(engine, SleepingEngine):
            lease = stack.enter_context(contextlib.closing(lease_device(recipe)))
            turns = TimeSlicedEngine(engine, lease, woken=worker.wake)
        async with GrpcServer(context.settings, [RolloutServicer(engine)]) as server:
            server.registry.register(EngineCollector(engine))
            if gateway is not None:
                server.registry.register(GatewayMetrics(gateway))
            if programs.boxes is not None:
                server.registry.register(BoxCollector(programs.boxes))
            agent = ReplicaController(
                recipe.weights,
                run=recipe.run.name,
                replica=context.name,
                engine=ServedEngine(
                    turns or engine,
                    recipe.weights,
                    on_update=recipe.rollout.on_update,
                    model_path=recipe.model.path,
                    drain_s=recipe.rollout.deadline_s,
                    pause_s=lambda: engine.stats().update_pause_s,
                ),
                transport=load_transport(recipe.weights, RunPaths(directory=recipe.run.path)),
                connect=lambda: tls.channel(trainer, CHANNEL_OPTIONS),
                report=lambda: ReplicaReport(engine=engine.stats(), worker=worker.report()),
                leave=server.stop,
            )
            try:
                await (turns or engine).start()
                await server.ready()
                beside = [agent.run(), until_run_differs(queue, recipe)]
                if turns:
                    beside.append(turns.run())
                with LoopWatchdog():
                    await work_until_stopped(
                        server,
                        worker.run(grace_s=STAGE_GRACE_S, serving=agent.serving),
                        drain,
                        *beside,
                    )
            except InfraError as error:
                if worker.stats.written:
                    raise
                raise NoProgressError(error.message) from error
            finally:
                await engine.close()
