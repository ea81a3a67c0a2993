"""The training loop: take, learn, settle, publish, checkpoint, evaluate.

Step s makes version v = s + 1. What runs beside what, over time, on rank 0:

    event loop      take ▸ fetch ▸ ········ ▸ settle ▸ ··········· ▸ publish v ▸ take ▸ fetch ▸ ···· ▸ publish v+1
    compute thread                 learn s           ▸ snapshot v                                      │
    weight plane    ── transfer of v-1 ────────────────────────────▸│── transfer of v ────────────────▸│── v+1
                                                    commit ▸ queue  ┘                  commit ▸ queue  ┘
    writer thread                     the copy that a due checkpoint made before `take` ── durable ▸ commit ▸ queue
    evaluation      held-out tasks of one version, once the fleet has committed it

- `publish` of v waits until the transfer of v-1 is through, but for a fleet that hangs no longer than for one that
  works; then it hands v over and returns: the transfer of v runs beside step s + 1, and at most one version is in
  transfer. A version that the fleet has committed goes to the queue, which admits new tasks by it.
- A checkpoint that is due waits for the write of the one before, copies weights and optimizer state on the compute
  thread, and is written beside the next steps. The queue releases its rows (commit) once it is durable.
- A queue that is unavailable (its host stops at the same moment, or it stays away for longer than calls wait) ends
  training with a checkpoint. It names the batch that was trained and could not be settled; `resume` settles it.
- One evaluation runs at a time, beside training. Training waits for it with `max_staleness: 0` and at step 0.

consumes: batches of complete groups. waits for: a batch, the transfer and the write as above. unblocked by: the
queue, the publisher, `drain`. produces: versions, checkpoints, metrics, logged rows. All ranks run this loop. Only
rank 0 decides with the queue what comes next (take, settle, commit); the others get the manifest from it and fetch
their own rows.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from typing import NamedTuple

from torch.distributed import DistError

from meshrl.common import tracing
from meshrl.common.plain_text import counted
from meshrl.contract.errors import (
    AWAY,
    CorruptError,
    MeshError,
    PartFailedError,
    UnavailableError,
    UserError,
)
from meshrl.contract.ports import Publisher, WeightSource
from meshrl.contract.rows import with_media
from meshrl.contract.types import MEDIA, Batch, Json, TrainerPhase, Trajectory, Uid, Version
from meshrl.trainer.checkpoint.async_checkpointer import AsyncCheckpointer
from meshrl.trainer.checkpoint.checkpoint import TrainerState
from meshrl.trainer.learner.experience import Schedule
from meshrl.trainer.learner.learner import Learned
from meshrl.trainer.loop.batch_source import (
    BatchSource,
    LoopCommand,
    of_all_ranks,
    trainable,
    unreadable,
)
from meshrl.trainer.loop.context import RunContext
from meshrl.trainer.loop.dynamic_sampling import without
from meshrl.trainer.loop.evaluation import EvaluationSchedule, Evaluator
from meshrl.trainer.loop.reward_guard import BatchQueue, RewardVersionGuard
from meshrl.trainer.loop.status import LiveStatus
from meshrl.trainer.loop.time_slices import Always, DeviceTurns
from meshrl.trainer.metrics.log import MetricsLog
from meshrl.trainer.metrics.utilisation import FOLDER, peak_memory, peak_tflops, profiled
from meshrl.trainer.trajectories.log import TrajectoryLog

log = logging.getLogger(__name__)

NOT_OF_ROWS = (MeshError, OSError, DistError)
"""Errors of a step that fails for another reason than its rows: a peer that is gone, or a full disk."""
PROFILED_AFTER = 2
"""Steps of a process before the one that `trainer.profile` records: the first ones start what the others use."""


class Fetched(NamedTuple):
    """A batch and what one rank needs of it."""

    batch: Batch
    schedule: Schedule
    rows: Sequence[Trajectory]
    baselines: Mapping[str, float] | None


class Trainer:
    """One run's trainer, on one rank, from `state` on (see `resume`)."""

    def __init__(
        self,
        context: RunContext,
        state: TrainerState,
        publisher: Publisher,
        *,
        rewards: RewardVersionGuard | None = None,
        evaluator: Evaluator | None = None,
        metrics: MetricsLog | None = None,
        trajectories: TrajectoryLog | None = None,
        turns: DeviceTurns | None = None,
    ) -> None:
        """Prepare; nothing is touched before `run`.

        Args:
            context: Model, queue and settings, with the learner as `resume` left it.
            state: The result of `resume`: the epoch that holds the run, its step and counts.
            publisher: Takes versions, on rank 0. It tells the queue what the fleet has committed.
            rewards: Makes each batch one of a single reward version; None takes rows as they were scored.
            evaluator: Held-out tasks, on rank 0 only; None evaluates nothing.
            metrics: Log of metrics, on rank 0 only; the caller closes it.
            trajectories: Log of rows, on rank 0 only; the caller closes it.
            turns: When the device is the trainer's, which has it now; None: always.
        """
        settings = context.settings
        self._context = context
        self._settings = settings
        self._state = state
        self._learner = context.learner
        self._world = context.learner.world
        self._compute = context.compute
        self._rewards = rewards
        self._batches: BatchQueue = rewards or context.queue
        self._publisher = publisher
        self._metrics = metrics
        self._trajectories = trajectories
        self._profiled_step = PROFILED_AFTER + 1
        self._checkpointer = AsyncCheckpointer(context, step=state.step)
        self._turns = turns or Always()
        self.status = LiveStatus(
            settings.total_steps,
            run=settings.run,
            ranks=self._world.size,
            peak_tflops=peak_tflops(self._world.device),
        )
        """The state of training, for clients and watchers."""
        self._source = BatchSource(context, self.status, publisher, rewards)
        self._evaluation = (
            EvaluationSchedule(evaluator, publisher, settings, metrics, self.status)
            if evaluator
            else None
        )
        self.drained = False
        """Whether `run` ended before the run's end: it can be resumed."""

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self._state.step

    def drain(self) -> None:
        """Finish the running step, save, commit and return from `run` (SIGTERM)."""
        self._source.leave()
        if self._evaluation:
            self._evaluation.drain()

    async def run(self) -> TrainerState:
        """Train to the end of the steps or of the data, or until drained.

        Raises:
            FencedError: another trainer took the run over.
        """
        failed = True
        try:
            await self._checkpointer.run_beside(self._train_to_the_end())
            failed = False
            return self._state
        finally:
            await self._stop(failed)

    async def _train_to_the_end(self) -> None:
        await self._begin()
        while isinstance(work := await self._next(), Batch):
            every = self._settings.trainer.save_freq
            if await self._train(work) and every > 0 and self.step % every == 0:
                await self._save()
        await self._save()
        with self.status.phase(TrainerPhase.CHECKPOINTING):
            await self._checkpointer.wait_done()
        self._source.check()
        self.drained = work is LoopCommand.DRAIN
        if work is LoopCommand.END:
            await self._finish()

    async def _next(self) -> Batch | LoopCommand:
        """The next batch or command, the same on every rank."""
        if self._evaluation:
            with self.status.phase(TrainerPhase.EVALUATING), self._source.giving_up():
                await self._source.keep_ranks_waiting(
                    self._evaluation.start_if_due(self.status.version)
                )
        with self.status.phase(TrainerPhase.WAITING):
            return await self._source.next(self._state.epoch, self.step)

    async def _train(self, batch: Batch) -> bool:
        """One step. Then the batch is in the weights, the queue knows, and the version is on its way to the fleet.

        False: nothing of the batch could be read. Another one is taken for the step, if the queue is available.
        """
        began_ns = time.time_ns()
        with self.status.phase(TrainerPhase.TRAINING, "fetching"):
            fetched = await self._fetched(batch)
        if fetched is None:
            return False
        batch, schedule, rows, baselines = fetched
        await self._have_device()
        with self.status.phase(TrainerPhase.TRAINING):
            async with self._log_rows(schedule) as observe, self._telling_of_parts(batch):
                metrics = await self._compute.run(
                    self._profiled(
                        batch.step + 1,
                        lambda: self._learner.learn(schedule, rows, batch.step, baselines, observe),
                    )
                )
        unsettled = await self._source.settle(batch, self._state.epoch)
        if self._world.is_main and tracing.is_on():
            trained = (row.uid for row in batch.rows)
            tracing.record_rows(
                "learn", trained, began_ns, step=batch.step + 1, epoch=self._state.epoch
            )
        tokens = sum(row.num_tokens for row in batch.rows)
        self._state = dataclasses.replace(
            self._state,
            step=batch.step + 1,
            kl_coef=self._learner.kl_coef,
            rows_trained=self._state.rows_trained + len(batch.rows),
            tokens_trained=self._state.tokens_trained + tokens,
            unsettled=unsettled,
        )
        if not unsettled:
            await self._publish()
        staleness = Counter(max(0, batch.step - row.oldest.step) for row in batch.rows)
        metrics |= peak_memory(self._world.device) | dict(self._turns.metrics)
        metrics |= self._source.metrics | (self._rewards.metrics if self._rewards else {})
        metrics = self.status.stepped(metrics, staleness, tokens)
        if self._metrics:
            self._metrics.write(self.step, metrics)
        return True

    @asynccontextmanager
    async def _telling_of_parts(self, batch: Batch) -> AsyncIterator[None]:
        """Around a step: if it fails, and its batch is a part of one that trainers had died with, say so.

        The queue hears of a group that fails alone, by that itself: not of a peer that is gone or a full disk.

        Raises:
            PartFailedError: that is no sign that nothing will ever be trained.
        """
        try:
            yield
        except UserError:
            raise
        except Exception as error:
            if len(batch.groups) == 1 and not isinstance(error, NOT_OF_ROWS):
                await self._source.tell_of_failure(batch, self._state.epoch, error)
            if 2 * len(batch.groups) > self._settings.batch_groups:
                raise
            log.exception("step %d: a part of a batch cannot be trained", batch.step + 1)
            groups = counted(len(batch.groups), "group")
            raise PartFailedError(
                f"step {batch.step + 1} of {groups}: {type(error).__name__}: {error}"
            ) from error

    async def _fetched(self, batch: Batch) -> Fetched | None:
        """The rows of the batch that this rank needs, less groups with rows that it cannot compute with.

        None where none is left, or some rank cannot read its rows now.
        """
        run = self._settings.run
        while batch.rows:
            schedule = self._learner.schedule(batch)
            uids = schedule.uids(self._world.data_rank)
            damaged: dict[Uid, str] = {}
            away = ""
            try:
                try:
                    rows = await self._read(uids)
                    baselines = await self._baselines(schedule)
                except CorruptError:
                    damaged = await unreadable(self._read, uids)
                    others = (row.uid for row in schedule.baselines)
                    damaged |= await unreadable(
                        lambda uids: self._batches.fetch_rows(run, uids, ("reward",)), others
                    )
                    if not damaged:
                        raise
            except AWAY as error:
                away = str(error)
            damaged, away = await of_all_ranks(self._world, self._compute, damaged, away)
            if away:
                self._source.give_up(UnavailableError(away))
                return None
            if not damaged:
                return Fetched(batch, schedule, rows, baselines)
            batch = without(batch, damaged)
            if self._world.is_main:
                await self._source.drop(damaged, self._state.epoch)
        return None

    async def _read(self, uids: Sequence[Uid]) -> list[Trajectory]:
        """Rows from the queue. Raises CorruptError."""
        columns = await self._batches.fetch_rows(self._settings.run, uids, self._learner.columns)
        rows = [
            trainable(uid, column, vocabulary=self._learner.vocabulary)
            for uid, column in zip(uids, columns, strict=True)
        ]
        if MEDIA in self._learner.columns:
            rows = with_media(rows)
        self._learner.check(rows)
        return rows

    def _profiled(
        self, step: int, learn: Callable[[], dict[str, Json]]
    ) -> Callable[[], dict[str, Json]]:
        """`learn`, recorded if this is the step that is to be."""
        trainer = self._settings.trainer
        if trainer.profile == "off" or step != self._profiled_step:
            return learn
        file = self._settings.directory / FOLDER / f"step-{step}-rank-{self._world.rank}"
        return profiled(learn, trainer.profile, file, self._world.device)

    def _log_rows(
        self, schedule: Schedule
    ) -> AbstractAsyncContextManager[Callable[[Learned], None] | None]:
        if self._trajectories is None:
            return nullcontext()
        return self._trajectories.step(schedule, self._state.epoch, self._batches)

    async def _baselines(self, schedule: Schedule) -> dict[str, float] | None:
        """Group to the reward of its greedy row; None where the algorithm has none."""
        if not schedule.extra_rows:
            return None
        uids = [row.uid for row in schedule.baselines]
        columns = await self._batches.fetch_rows(self._settings.run, uids, ("reward",))
        return {
            row.group: float(column["reward"][0])
            for row, column in zip(schedule.baselines, columns, strict=True)
        }

    async def _have_device(self) -> None:
        """Wait for this trainer's turn: engines that use the device too have loaded the last version before."""
        if not isinstance(self._turns, Always):
            with self.status.phase(TrainerPhase.WAITING, "device"):
                await self._publisher.drained()
                await self._turns.acquire()

    async def _publish(self) -> None:
        """Freeze this version and hand it to the weight plane, once the previous version is through.

        The transfer runs beside the next step.
        """
        self.status.version = version = Version(self._state.epoch, self.step)
        settings, policy = self._settings, self._learner.policy
        publishing: list[asyncio.Future[None]] = []
        loop, in_turns = asyncio.get_running_loop(), not isinstance(self._turns, Always)

        def publish(planned: WeightSource) -> None:
            publishing.append(asyncio.ensure_future(self._publisher.publish(planned)))
            # Looked at: when the gather fails, nobody waits for it.
            publishing[0].add_done_callback(lambda done: done.cancelled() or done.exception())

        def on_plan(planned: WeightSource) -> None:
            if not in_turns:  # engines that use the device too get it when all is gathered
                loop.call_soon_threadsafe(publish, planned)

        with self.status.phase(TrainerPhase.PUBLISHING):
            try:
                snapshot = await self._compute.run(
                    lambda: self._context.snapshot(
                        policy,
                        self._world,
                        run=settings.run,
                        version=version,
                        dtype=settings.weight_dtype,
                        bucket_bytes=settings.bucket_bytes,
                        adapters_only=settings.adapters_only,
                        on_plan=on_plan,
                    )
                )
                await self._turns.release(version_follows=True)
                if snapshot is not None and not publishing:
                    publish(snapshot)
                for each in publishing:
                    with self._source.giving_up():
                        await self._source.keep_ranks_waiting(each)
            finally:
                for each in publishing:
                    each.cancel()

    async def _begin(self) -> None:
        await self._checkpointer.open()
        self._profiled_step = self.step + PROFILED_AFTER + 1
        self.status.resumed(Version(self._state.epoch, self.step), self._state.rows_trained)
        if self._metrics:
            self._metrics.resume_at(self.step)
        if self._trajectories:
            self._trajectories.resume_at(self.step)
        if self._evaluation:
            await self._evaluation.open()
        await self._publish()

    async def _save(self) -> None:
        """Start a checkpoint; once it is durable, the queue releases its rows."""
        with self.status.phase(TrainerPhase.CHECKPOINTING):
            await self._checkpointer.begin(self._state)

    async def _finish(self) -> None:
        """Export the last version, wait for its transfer and evaluate it."""
        learner, settings = self._learner, self._settings
        await self._have_device()
        with self.status.phase(TrainerPhase.CHECKPOINTING):
            target = settings.directory / "export"
            await self._compute.run(
                lambda: self._context.export(
                    learner.policy, self._world, target, tokenizer=settings.tokenizer
                )
            )
        await self._turns.release()
        if self._world.is_main:
            with self.status.phase(TrainerPhase.PUBLISHING):
                await self._publisher.drained()
        if self._evaluation:
            with self.status.phase(TrainerPhase.EVALUATING):
                await self._evaluation.finish(self.status.version)

    async def _stop(self, failed: bool) -> None:
        """Close what this loop owns."""
        if self._evaluation:
            await self._evaluation.close()
        await self._checkpointer.close()
        if self._rewards:
            await self._rewards.close()
        self.status.ended(failed)
