"""The training loop: take, learn, settle, publish, checkpoint, evaluate.

    queue ──take──▶ learn (compute thread) ──settle──▶ queue
                      │                                  ▲ commit, after a durable checkpoint
                      ├──snapshot──▶ publisher ──▶ fleet │
                      └──copy──▶ Saves ──────────────────┘
    evaluations: one task beside the loop, owned by it

consumes: batches of complete groups. waits for: a batch, the previous version's transfer. unblocked by: the queue,
the publisher, `drain`. produces: versions, checkpoints, metrics. All ranks run this loop; only rank 0 speaks with the
queue about order (take, settle, commit), the others hear the manifest from it and fetch their own rows.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import cast

from meshrl.contract.ports import Publisher, Queue
from meshrl.contract.rows import trajectory
from meshrl.contract.types import Batch, TrainerPhase, Version
from meshrl.trainer.batch_source import BatchSource, Word
from meshrl.trainer.checkpoint.async_checkpointer import AsyncCheckpointer
from meshrl.trainer.checkpoint.checkpoint import TrainerState
from meshrl.trainer.checkpoint.export import export_policy
from meshrl.trainer.compute import Compute
from meshrl.trainer.control import Control
from meshrl.trainer.evaluation_schedule import Evaluations
from meshrl.trainer.evaluator import Evaluator
from meshrl.trainer.learner.experience import Schedule
from meshrl.trainer.learner.learner import Learner
from meshrl.trainer.metrics import MetricsLog
from meshrl.trainer.model.snapshot import take_snapshot
from meshrl.trainer.reward_version_guard import RewardVersionGuard
from meshrl.trainer.settings import TrainerSettings
from meshrl.trainer.status import Board


class Trainer:
    """One run's trainer, on one rank, from `state` on (see `resume`)."""

    def __init__(
        self,
        setting: TrainerSettings,
        state: TrainerState,
        learner: Learner,
        compute: Compute,
        queue: Queue,
        publisher: Publisher,
        *,
        rewards: RewardVersionGuard | None = None,
        evaluator: Evaluator | None = None,
        metrics: MetricsLog | None = None,
    ) -> None:
        """Prepare; nothing is touched before `run`.

        Args:
            setting: What to train and where.
            state: What `resume` gave: the epoch that holds the run, and where it stands.
            learner: Policy, optimizer and algorithm, as `resume` left them.
            compute: The thread that computes; the caller closes it.
            queue: Where batches come from.
            publisher: Where versions go; used on rank 0. It tells the queue what the fleet has committed.
            rewards: Makes each batch one of a single reward version; None takes rows as they were scored.
            evaluator: Held-out tasks, on rank 0 only; None evaluates nothing.
            metrics: Where numbers go, on rank 0 only.
        """
        self._setting = setting
        self._state = state
        self._learner = learner
        self._world = learner.world
        self._compute = compute
        queue = cast(Queue, rewards) if rewards else queue
        self._rewards = rewards
        self._queue = queue
        self._publisher = publisher
        self._metrics = metrics
        self._saves = AsyncCheckpointer(setting, learner, compute, queue, step=state.step)
        self._board = Board(setting.total_steps)
        self._intake = BatchSource(setting, queue, self._world, compute, self._board, rewards)
        self._evaluations = (
            Evaluations(evaluator, publisher, setting, metrics, self._board) if evaluator else None
        )
        self.control = Control(self._board, self._intake, self.drain)

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self._state.step

    def drain(self) -> None:
        """Finish the running step, save, commit and return from `run` (SIGTERM)."""
        self._intake.drain()
        if self._evaluations:
            self._evaluations.drain()

    async def run(self) -> TrainerState:
        """Train to the end of the steps or of the data, or until drained.

        Raises:
            FencedError: another trainer took the run over.
        """
        failed = True
        try:
            await self._saves.beside(self._learn_to_the_end())
            failed = False
            return self._state
        finally:
            await self._stop(failed)

    async def _learn_to_the_end(self) -> None:
        await self._begin()
        while (given := await self._next()) not in (Word.END, Word.DRAIN):
            if isinstance(given, Batch):
                await self._train(given)
            if given is Word.SAVE:
                await self._save_now()
            elif self._due(self._setting.trainer.save_freq):
                await self._save()
        await self._save_now()
        if given is Word.END:
            await self._finish()

    async def _next(self) -> Batch | Word:
        """The same on every rank."""
        if self._evaluations:
            with self._board.phase(TrainerPhase.EVALUATING):
                await self._intake.keep_peers(self._evaluations.consider(self._board.version))
        with self._board.phase(TrainerPhase.WAITING):
            return await self._intake.next(self._state.epoch, self.step)

    async def _train(self, batch: Batch) -> None:
        """One step: after it, the batch is in the weights, the queue knows, and the fleet is being told."""
        made = self._learner.schedule(batch)
        uids = made.uids(self._world.data_rank)
        with self._board.phase(TrainerPhase.TRAINING, "fetching"):
            columns = await self._queue.fetch(self._setting.run, uids, self._learner.columns)
            rows = [trajectory(uid, column) for uid, column in zip(uids, columns, strict=True)]
            baselines = await self._baselines(made)
        with self._board.phase(TrainerPhase.TRAINING):
            numbers = await self._compute.run(
                lambda: self._learner.learn(made, rows, batch.step, baselines)
            )
        if self._world.is_main:
            await self._intake.settle(batch, self._state.epoch)
        tokens = sum(row.num_tokens for row in batch.rows)
        self._state = dataclasses.replace(
            self._state,
            step=batch.step + 1,
            kl_coef=self._learner.kl_coef,
            rows_trained=self._state.rows_trained + len(batch.rows),
            tokens_trained=self._state.tokens_trained + tokens,
        )
        await self._publish()
        staleness = Counter(max(0, batch.step - row.oldest.step) for row in batch.rows)
        numbers |= self._intake.facts | (self._rewards.facts if self._rewards else {})
        whole = self._board.stepped(numbers, staleness, tokens)
        if self._metrics:
            self._metrics.write(batch.step, whole)

    async def _baselines(self, made: Schedule) -> dict[str, float] | None:
        """Group to the reward of its greedy row; None where the algorithm has none."""
        if not made.extra_rows:
            return None
        uids = [row.uid for row in made.baselines]
        columns = await self._queue.fetch(self._setting.run, uids, ("reward",))
        return {
            row.group: float(column["reward"][0])
            for row, column in zip(made.baselines, columns, strict=True)
        }

    async def _publish(self) -> None:
        """Freeze this version and hand it to the weight plane; the transfer goes on while the next step is made."""
        self._board.version = version = Version(self._state.epoch, self.step)
        setting, policy = self._setting, self._learner.policy
        with self._board.phase(TrainerPhase.PUBLISHING):
            frozen = await self._compute.run(
                lambda: take_snapshot(
                    policy,
                    self._world,
                    run=setting.run,
                    version=version,
                    dtype=setting.weight_dtype,
                    bucket_bytes=setting.bucket_bytes,
                    adapters_only=setting.adapters_only,
                )
            )
            if frozen is not None:
                await self._intake.keep_peers(self._publisher.publish(frozen))

    async def _begin(self) -> None:
        self._board.resumed(Version(self._state.epoch, self.step), self._state.rows_trained)
        if self._metrics:
            self._metrics.resume_at(self.step)
        if self._evaluations:
            await self._evaluations.open()
        await self._publish()

    def _due(self, frequency: int) -> bool:
        return frequency > 0 and self.step % frequency == 0

    async def _save(self) -> None:
        """Start a checkpoint; once it is durable its rows are released."""
        with self._board.phase(TrainerPhase.CHECKPOINTING):
            await self._saves.begin(self._state)

    async def _save_now(self) -> None:
        """Return when the checkpoint of this step is durable and its rows are released."""
        await self._save()
        with self._board.phase(TrainerPhase.CHECKPOINTING):
            await self._saves.done()
        self._intake.saved(self.step)

    async def _finish(self) -> None:
        """The data or the steps have ended: export the last version and evaluate it."""
        learner, setting = self._learner, self._setting
        with self._board.phase(TrainerPhase.CHECKPOINTING):
            target = setting.directory / "export"
            await self._compute.run(
                lambda: export_policy(
                    learner.policy, self._world, target, tokenizer=setting.tokenizer
                )
            )
        if self._world.is_main:
            with self._board.phase(TrainerPhase.PUBLISHING):
                await self._publisher.drained()
        if self._evaluations:
            with self._board.phase(TrainerPhase.EVALUATING):
                await self._evaluations.finish(self._board.version)

    async def _stop(self, failed: bool) -> None:
        """End what this loop owns."""
        if self._evaluations:
            await self._evaluations.close()
        await self._saves.close()
        self._intake.close()
        if self._rewards:
            await self._rewards.close()
        if self._metrics:
            self._metrics.close()
        self._board.ended(failed)
