"""The work of a stage's service: find its runs, lease rows until stopped, drain. `serve_stage` does it all.

The trainer and the feeder open runs. A stage may come before them: its leases wait for a run by its name.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from meshrl.common.device_lease import DeviceLease
from meshrl.config.recipe import EVAL_SUFFIX, Recipe, has_evaluation
from meshrl.config.stages import stage_specs, train_spec
from meshrl.contract.errors import ConflictError, NotFoundError, UserError
from meshrl.contract.ports import Queue
from meshrl.contract.stage_worker import Handler, Intake, StageWorker
from meshrl.contract.types import RunSpec
from meshrl.rpc.process_memory import freeze_startup_objects
from meshrl.rpc.queue_connection import connect_mesh_queue
from meshrl.rpc.runtime import GrpcServer, ServiceContext
from meshrl.transferqueue.model.specs import joined_specs

STAGE_GRACE_S = 10.0
"""How long a draining stage may finish what it holds; what is left then goes back to the queue untouched."""

LOOK_S = 1.0
"""Seconds between two checks for a run that is not open yet."""

LONGEST_CONFLICT = 200
"""Longest message of a conflict that is shown whole, in characters; two lists of stages are longer."""


async def serve_stage(
    recipe: Recipe,
    context: ServiceContext,
    handle: Handler,
    *,
    limit: int = 64,
    rows_per_call: int = 1,
) -> None:
    """Run the recipe's stage `context.kind`: lease its rows and write back what `handle` answers, until stopped.

    Args:
        recipe: What the mesh runs.
        context: What `run` was given.
        handle: From leased rows to as many results: a `RowWrite`, a `Failure` (the row is tried again, up to
            `queue.max_attempts` times, or once more where it is `lasting`) or a `Returned` (as if it had not been
            leased). An exception fails all.
        limit: Rows that are worked on at once.
        rows_per_call: Rows that one call of `handle` gets.
    """
    async with (
        connect_mesh_queue(recipe, context) as queue,
        GrpcServer(context.settings, []) as server,
    ):
        await find_runs(queue, recipe)
        runs = [recipe.run.name]
        if has_evaluation(recipe) and any(
            spec.name == context.kind for spec in stage_specs(recipe, evaluation=True)
        ):
            runs.append(recipe.run.name + EVAL_SUFFIX)
        stage = next(spec for spec in stage_specs(recipe) if spec.name == context.kind)
        worker = StageWorker(
            queue,
            runs,
            stage,
            handle,
            worker=context.name,
            intake=Intake(limit=limit, per_call=rows_per_call),
        )
        await server.ready()
        await work_until_stopped(
            server,
            worker.run(grace_s=STAGE_GRACE_S),
            worker.drain,
            until_run_differs(queue, recipe),
        )


def lease_device(recipe: Recipe) -> DeviceLease:
    """This process's part in the turns on the device that the run's trainer and engines share."""
    return DeviceLease(recipe.run.path / "device.lease")


async def open_runs(queue: Queue, recipe: Recipe) -> None:
    """Open the training run, as the trainer and the feeder do, whichever comes first.

    Raises:
        UserError: a run of this name exists with other settings.
    """
    await open_run(queue, train_spec(recipe), recipe)


async def open_run(queue: Queue, spec: RunSpec, recipe: Recipe) -> None:
    """Open one run. Raises UserError when a run of this name exists with other settings."""
    try:
        await queue.open_run(spec)
    except ConflictError as error:
        raise _other_settings(error, spec, recipe) from error


async def find_runs(queue: Queue, recipe: Recipe) -> tuple[str, ...]:
    """The names of the runs that stages work on, whether or not they are open yet.

    Raises:
        UserError: a run of this name exists with other settings.
    """
    spec = train_spec(recipe)
    await _is_open(queue, spec, recipe)
    return (spec.run + EVAL_SUFFIX, spec.run) if has_evaluation(recipe) else (spec.run,)


async def until_run_differs(queue: Queue, recipe: Recipe) -> None:
    """Watch, during a stage's work, until the run is open; then wait for ever.

    Raises:
        UserError: it was opened with other settings.
    """
    spec = train_spec(recipe)
    while not await _is_open(queue, spec, recipe):  # noqa: ASYNC110 - nobody announces it
        await asyncio.sleep(LOOK_S)
    await asyncio.get_running_loop().create_future()


async def _is_open(queue: Queue, spec: RunSpec, recipe: Recipe) -> bool:
    """Raises UserError when a run of this name exists with other settings."""
    try:
        joined_specs((await queue.run_state(spec.run)).spec, spec)
    except NotFoundError:
        return False
    except ConflictError as error:
        raise _other_settings(error, spec, recipe) from error
    return True


def _other_settings(error: ConflictError, spec: RunSpec, recipe: Recipe) -> UserError:
    reason = str(error)
    if len(reason) > LONGEST_CONFLICT:
        reason = f"run {spec.run} is open with another {error.details.get('field', 'spec')}"
    return UserError(
        f"{reason}; the queue in {recipe.queue_path} holds this run from before: "
        "keep its settings, choose another run.name, or remove the directory"
    )


async def work_until_stopped(
    server: GrpcServer,
    work: Awaitable[object],
    drain: Callable[[], None],
    *beside: Awaitable[None],
) -> None:
    """Work until the server is asked to stop, then drain.

    Args:
        server: A signal asks it to stop.
        work: Returns some time after `drain` was called; earlier when it has nothing left to do.
        drain: Ends `work`.
        beside: Run for as long as `work` does, and must not end before it.

    Raises:
        Whatever `work` or `beside` raises.
    """
    freeze_startup_objects()
    working = asyncio.ensure_future(work)
    stopped = asyncio.ensure_future(server.until_stopped())
    watched: set[asyncio.Future[Any]] = {working, stopped, *map(asyncio.ensure_future, beside)}
    try:
        done, _ = await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
        for ended in done:
            ended.result()
        drain()
        # Draining must not wait for a helper that failed meanwhile.
        await asyncio.wait(watched - {stopped}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
    finally:
        for future in watched:
            future.cancel()
        await asyncio.gather(*watched, return_exceptions=True)
