"""Taking a run over: a new epoch, the newest good checkpoint, the queue set back to it.

A checkpoint may name a batch that it was trained on and the queue has not heard of, because the queue was away when
the trainer ended. That is reported first: rows are never in the weights and in the queue at once.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import time
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

import numpy as np

from meshrl.common.files import replace_file
from meshrl.contract.errors import FencedError, NotFoundError, UserError
from meshrl.contract.ports import Queue
from meshrl.contract.types import Json
from meshrl.trainer.checkpoint.checkpoint import TrainerState
from meshrl.trainer.loop.context import RunContext
from meshrl.trainer.ranks.peers import Seat
from meshrl.trainer.ranks.world import World

log = logging.getLogger(__name__)

SHARED_S = 10.0
"""How long a file may take to be seen on another machine."""
LOOK_AGAIN_S = 0.5


async def resume(context: RunContext) -> TrainerState:
    """Every rank calls this; afterwards all are at the same step, and older trainers are fenced.

    Raises:
        UserError: the checkpoints do not go with the queue's history.
    """
    settings, queue, learner = context.settings, context.queue, context.learner
    compute, world = context.compute, learner.world
    found = await _newest(context)
    opening = await _acquire(context, found) if world.is_main else {}
    opening = json.loads(await compute.run(lambda: world.broadcast(json.dumps(opening).encode())))
    epoch: int = opening["epoch"]
    if opening["look_again"]:
        found = await _newest(context)
    while found is not None and not await _is_settled(context, found, epoch):
        found = await _newest(context)
    state = TrainerState(
        run=settings.run,
        step=0,
        epoch=0,
        seed=settings.seed,
        world_size=world.size,
        kl_coef=learner.kl_coef,
    )
    if found is not None:
        path = found[0]
        state = await compute.run(
            lambda: context.checkpoints.load(
                path, learner.policy, learner.optimizers, beside=learner.beside
            )
        )
        learner.kl_coef = state.kl_coef
        log.info("run %s: resumed at step %d from %s", settings.run, state.step, path)
    state = dataclasses.replace(state, epoch=epoch, world_size=world.size, unsettled=())
    if world.is_main:
        # A predecessor may have died between its checkpoint and the commit.
        await queue.commit(settings.run, epoch=state.epoch, step=state.step)
        returned = await queue.rewind(settings.run, epoch=state.epoch, step=state.step)
        if returned:
            log.info(
                "run %s: %d rows settled after step %d return", settings.run, returned, state.step
            )
    return state


async def _newest(context: RunContext) -> tuple[Path, TrainerState] | None:
    """The checkpoint to start from, the same on every rank; each reads its share of the files."""
    settings, world = context.settings, context.learner.world
    if settings.trainer.resume_mode != "auto":
        return None
    return await context.compute.run(
        lambda: context.checkpoints.newest(settings.checkpoints, world)
    )


async def _acquire(
    context: RunContext, newest: tuple[Path, TrainerState] | None
) -> dict[str, Json]:
    """A new epoch, and whether there is a newer checkpoint than `newest` by now.

    Raises:
        UserError: the queue has released rows that the newest checkpoint was not trained on.
    """
    settings, queue, checkpoints = context.settings, context.queue, context.checkpoints
    run = settings.run
    run_state = await queue.run_state(run)
    root = settings.checkpoints
    if newest and newest[1].run != run:
        raise UserError(
            f"{newest[0]} belongs to run {newest[1].run!r}, not {run!r}: give each run a directory of its own"
        )
    step = newest[1].step if newest else 0
    if step < run_state.committed_step:
        used = f"{newest[0]} is of step {step}" if newest else f"no checkpoint in {root} is used"
        raise UserError(
            f"run {run!r} has committed step {run_state.committed_step} to the queue, but {used}: "
            "restore the checkpoint, or start a run with another name"
        )
    if newest:
        # `acquire` gives back what is not settled. Where it is too late, `_is_settled` finds out.
        with suppress(FencedError, NotFoundError):
            await _settle(queue, newest[1], newest[1].epoch)
    state = await queue.acquire(run, settings.owner)
    # A predecessor that is fenced now may still be writing, or begin to: from here on it puts nothing in place.
    # What it finished between our look and this is newer than what we saw.
    checkpoints.take_over(root, state.epoch)
    last = next((path for _, path in checkpoints.complete(root)), None)
    again = settings.trainer.resume_mode == "auto" and last != (newest[0] if newest else None)
    return {"epoch": state.epoch, "look_again": again}


async def _settle(queue: Queue, state: TrainerState, epoch: int) -> None:
    """Settle the batches of the last step of `state` that the queue has not settled.

    Raises:
        NotFoundError: it has given these rows back, and they will be trained again.
    """
    for batch_id in state.unsettled:
        await queue.settle(state.run, epoch=epoch, step=state.step - 1, batch_id=batch_id)


async def _is_settled(context: RunContext, found: tuple[Path, TrainerState], epoch: int) -> bool:
    """Whether the queue knows of every row that a checkpoint was trained on; the same on every rank.

    False: it is removed. It was put in place between our look and `acquire`, which gave its last batch back.
    """
    world = context.learner.world
    path, state = found
    if not state.unsettled:
        return True
    gone = b""
    if world.is_main:
        try:
            await _settle(context.queue, state, epoch)
        except NotFoundError as error:
            log.warning("%s is removed, its last batch is trained again: %s", path, error)
            context.checkpoints.remove(path)
            gone = b"gone"
    return not await context.compute.run(lambda: world.broadcast(gone))


def require_shared(world: World, folder: Path) -> None:
    """Check that machines share the directory. Every rank calls this. Raises UserError, on all."""
    if Seat.of(os.environ).machines == 1:
        return
    mark, token = folder / ".machines", uuid4().hex
    if world.is_main:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            replace_file(mark, token)
        except OSError as error:
            token = f"the folder of checkpoints cannot be written: {error}"
    token = world.broadcast(token.encode()).decode()
    deadline = time.monotonic() + SHARED_S
    while " " not in token and not (seen := _reads(mark, token)) and time.monotonic() < deadline:
        time.sleep(LOOK_AGAIN_S)
    if " " in token:
        raise UserError(token)
    blind = [n for n, each in enumerate(world.all_gather(np.array([seen]))) if not each[0]]
    if blind:
        raise UserError(
            f"trainer.nnodes: rank {blind[0]} does not see {folder} of rank 0: all machines of the trainer need the"
            " same trainer.default_local_dir (or run.dir), on shared storage"
        )


def _reads(path: Path, text: str) -> bool:
    try:
        return path.read_text() == text
    except OSError:
        return False
