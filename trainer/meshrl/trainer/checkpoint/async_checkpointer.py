"""Writes checkpoints beside training: weights are copied, then written during the next steps.

    loop ──begin──▶ freeze (compute thread) ──▶ write (a thread and a gloo group of its own) ──▶ commit to the queue
                                                  durable: fsync, rename                         on rank 0

consumes: states to save, on every rank alike. waits for: the write before it; other ranks' writers, in their own
collectives. unblocked by: the disk; a rank that dies ends its peers' collectives with an error. produces: durable
checkpoints, each followed by the commit that releases its rows.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

import torch

from meshrl.contract.errors import AWAY
from meshrl.trainer.checkpoint.afterwards import AfterCheckpoint, Wishes
from meshrl.trainer.checkpoint.checkpoint import TrainerState
from meshrl.trainer.checkpoint.dcp import Tensors
from meshrl.trainer.checkpoint.kept import Keep
from meshrl.trainer.loop.context import RunContext
from meshrl.trainer.ranks.world import Compute, World

log = logging.getLogger(__name__)
Result = TypeVar("Result")


class AsyncCheckpointer:
    """Writes one checkpoint at a time. Belongs to one event loop."""

    def __init__(self, context: RunContext, *, step: int) -> None:
        """`step`: of the checkpoint that this run resumed from; 0 for none.

        Copies are made on the thread that computes. The queue hears of a durable checkpoint, from rank 0.
        """
        self._settings = context.settings
        self._learner = context.learner
        self._compute = context.compute
        self._queue = context.queue
        self._checkpoints = context.checkpoints
        self._last_step = step or -1
        self._writer = Compute(torch.device("cpu"))
        self._world: World | None = None
        self._running: asyncio.Task[None] | None = None
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._afterwards = _afterwards(context)

    async def open(self) -> None:
        """Make the writer's group. Every rank calls this where no rank waits for another one's broadcast.

        A group is made by all ranks together: at the first save, rank 0 may be in a broadcast instead.
        """
        self._world = await self._compute.run(self._learner.world.with_own_group)
        newest = next(self._checkpoints.complete(self._settings.checkpoints), None)
        if self._afterwards is not None and newest is not None:
            self._afterwards.resume(newest[1].name)

    async def begin(self, state: TrainerState) -> None:
        """Copy weights and optimizer state and start to write them; waits for the write before. After `open`.

        Does nothing when this step is saved already. Raises the error of the write before.
        """
        if state.step == self._last_step:
            return
        await self.wait_done()
        learner = self._learner
        state = self._checkpoints.describe(state, learner.policy, learner.beside)
        tensors = await self._compute.run(
            lambda: self._checkpoints.freeze(learner.policy, learner.optimizers, learner.beside)
        )
        self._last_step = state.step
        assert self._world is not None
        self._running = asyncio.create_task(self._write(tensors, state, self._world))
        self._running.add_done_callback(self._ended)

    async def wait_done(self) -> None:
        """Return when no write is under way; raises the error of the last one."""
        if self._running is not None:
            await asyncio.shield(self._running)

    async def run_beside(self, work: Coroutine[Any, Any, Result]) -> Result:
        """The result of `work`; a write that fails meanwhile cancels it, and its error is raised."""
        task = asyncio.create_task(work)
        try:
            waited: set[asyncio.Future[Any]] = {task, self._failed}
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                self._failed.result()
            return await task
        finally:
            if not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    async def close(self) -> None:
        """Wait for the writer, even if it fails; idempotent."""
        if self._running is not None:
            await asyncio.gather(self._running, return_exceptions=True)
        if self._failed.done():
            self._failed.exception()  # mark as retrieved: the caller raises another error
        self._writer.close()
        if self._afterwards is not None:
            await self._afterwards.close()

    async def _write(self, tensors: Tensors, state: TrainerState, world: World) -> None:
        config = self._settings.trainer
        # Should a successor have what is unsettled trained again, it starts from the one before.
        newest = config.max_ckpt_to_keep + bool(state.unsettled)
        keep = Keep(newest=newest, every=config.keep_ckpt_every)
        root = self._settings.checkpoints
        path = await self._writer.run(
            lambda: self._checkpoints.write(root, tensors, state, world, keep=keep)
        )
        if world.is_main and not state.unsettled:
            try:
                await self._queue.commit(self._settings.run, epoch=state.epoch, step=state.step)
            except AWAY as error:  # the next commit, or that of `resume`, is one of this step too
                log.warning("step %d is saved, the queue does not know: %s", state.step, error)
            if self._afterwards is not None:
                self._afterwards.add(path.name)

    def _ended(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None and not self._failed.done():
            self._failed.set_exception(error)


def _afterwards(context: RunContext) -> AfterCheckpoint | None:
    """The work after checkpoints that the recipe asks for, on rank 0."""
    settings, config = context.settings, context.settings.trainer
    wanted = config.after_checkpoint or config.copy_checkpoints_to
    if not wanted or not context.learner.world.is_main:
        return None
    wishes = Wishes(
        run=settings.run,
        function=config.after_checkpoint,
        copies=config.copy_checkpoints_to,
        keep_newest=config.max_ckpt_to_keep,
        keep_every=config.keep_ckpt_every,
    )
    return AfterCheckpoint(settings.checkpoints, wishes)
