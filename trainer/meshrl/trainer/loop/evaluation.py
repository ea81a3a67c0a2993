"""Evaluation: held-out tasks go through the same mesh as a run of their own, `<run>.eval`.

    Evaluator ──admit──▶ queue ──▶ rollout ──▶ reward ──▶ queue ──take──▶ Evaluator ──settle, commit──▶ ledger

One runs at a time, beside training or, for on-policy runs, between two steps. The eval run is not gated: it neither
waits for versions nor counts in the training run's admission, and its ledger balances like any other.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

from meshrl.contract.errors import WaitTimeoutError
from meshrl.contract.ports import Publisher, Queue
from meshrl.contract.rows import trajectory
from meshrl.contract.types import (
    NOTES,
    Batch,
    RunSpec,
    Task,
    Trajectory,
    Version,
)
from meshrl.trainer.data.prompt_streams import LevelHistory, level_scores
from meshrl.trainer.data.reasoning_gym import ReasoningGymConfig
from meshrl.trainer.learner.metrics import component_means, source_means
from meshrl.trainer.loop.context import TrainerSettings
from meshrl.trainer.loop.status import LiveStatus
from meshrl.trainer.metrics.log import MetricsLog
from meshrl.trainer.trajectories.log import TrajectoryLog

log = logging.getLogger(__name__)

COLUMNS = (
    "tokens",
    "loss_mask",
    "rollout_logprobs",
    "spans",
    "response_text",
    "replica",
    "reward",
    "reward_components",
    "reward_hash",
    *chain(*NOTES.values()),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The result of one evaluation."""

    version: Version
    """The newest version that the fleet had when the tasks were admitted."""
    tasks: int
    lost_tasks: int
    """Tasks without a score because of infrastructure faults; they count in no mean."""
    score: float
    """Mean reward of the scored rows."""
    length: float
    """Mean response length in tokens."""
    components: Mapping[str, float]
    """Mean of each reward component over the rows that have it."""
    seconds: float
    sample: str
    """The first task's first answer."""
    by_source: Mapping[str, float] = field(default_factory=dict)
    """`<data source>/score`, `…/response_length` and `…/rows`, of the scored rows."""
    levels: Mapping[str, float] = field(default_factory=dict)
    """`<task>/level`, which its prompts for training have from now on, and `<task>/score`, the score at its level."""

    def metrics(self) -> dict[str, float | str]:
        """The metrics for metrics.jsonl."""
        return {
            "val/score/mean": self.score,
            "val/response_length": self.length,
            **{f"val/component/{name}": mean for name, mean in self.components.items()},
            **{f"val/source/{name}": mean for name, mean in self.by_source.items()},
            **{f"val/curriculum/{name}": value for name, value in self.levels.items()},
            "val/tasks": self.tasks,
            "val/lost_tasks": self.lost_tasks,
            "val/seconds": self.seconds,
            "val/version": str(self.version),
            "val/sample": self.sample,
            "time/unix_s": time.time(),
        }


class Evaluator:
    """Runs evaluations one after the other; call `open` first."""

    def __init__(
        self,
        queue: Queue,
        spec: RunSpec,
        tasks: Sequence[Task],
        *,
        owner: str,
        take_wait_s: float = 30.0,
        trajectories: TrajectoryLog | None = None,
        curriculum: ReasoningGymConfig | None = None,
    ) -> None:
        """Prepare.

        Args:
            queue: Source of rows.
            spec: The eval run: `<run>.eval`, not gated.
            tasks: Held-out prompts with their sampling parameters; their run and id are replaced.
            owner: Name of the trainer that acquires the eval run.
            take_wait_s: Length of one wait for rows.
            trajectories: Log of the rows; the caller closes it.
            curriculum: Whose levels follow the scores of each evaluation; the run's cursor is their history.
        """
        self.run = spec.run
        self._spec = spec
        self._queue = queue
        self._tasks = tuple(tasks)
        self._owner = owner
        self._take_wait_s = take_wait_s
        self._trajectories = trajectories
        self._curriculum = curriculum
        self._history = LevelHistory()
        self._epoch = 0
        self._step = 0

    async def open(self) -> None:
        """Declare the eval run and take it over; rows of a killed predecessor's evaluation leave with the next one.

        Raises:
            ConflictError: the queue holds this eval run from before with another spec.
        """
        await self._queue.open_run(self._spec)
        state = await self._queue.acquire(self.run, self._owner)
        self._epoch, self._step = state.epoch, state.committed_step
        self._history = LevelHistory.parse(state.cursor)
        await self._queue.rewind(self.run, epoch=self._epoch, step=self._step)

    async def evaluate(self, version: Version) -> Evaluation:
        """Send every task through the mesh once and wait for the scores.

        Raises:
            FencedError: another trainer took the eval run over.
        """
        begin = time.monotonic()
        # The epoch is part of the id: after a resume at the same step this is another evaluation, not the same
        # rows once more (which the queue would rightly count as admitted before).
        tasks = [
            dataclasses.replace(task, run=self.run, task_id=f"{version}-{index}")
            for index, task in enumerate(self._tasks)
        ]
        rows, lost_tasks = await self._answers(tasks)
        if self._trajectories:
            self._trajectories.evaluated(version, {task.task_id: task for task in tasks}, rows)
        scored = [(row, row.reward) for row in rows if row.reward is not None]
        scores = [score for _, score in scored]
        by_id = {task.task_id: task for task in tasks}
        answered = [(by_id[row.uid.task], score) for row, score in scored]
        levels = await self._decide(self._curriculum, version, answered) if self._curriculum else {}
        lengths = [len(row.tokens) - row.prompt_length for row in rows]
        first = min(
            rows,
            key=lambda row: (int(row.uid.task.rpartition("-")[2]), row.uid.index),
            default=None,
        )
        return Evaluation(
            version=version,
            tasks=len(tasks),
            lost_tasks=lost_tasks,
            score=sum(scores) / len(scores) if scores else math.nan,
            length=sum(lengths) / len(lengths) if lengths else math.nan,
            components=component_means([row.reward_components for row in rows]),
            seconds=time.monotonic() - begin,
            sample=first.response_text if first else "",
            levels=levels,
            by_source=source_means(
                [task.data_source for task, _ in answered],
                {
                    "score": scores,
                    "response_length": [len(row.tokens) - row.prompt_length for row, _ in scored],
                },
            ),
        )

    async def _decide(
        self,
        curriculum: ReasoningGymConfig,
        version: Version,
        scored: Sequence[tuple[Task, float]],
    ) -> dict[str, float]:
        """Let the levels follow the scores, and store them for the feeder; see `Evaluation.levels`."""
        assert curriculum.curriculum
        scores = level_scores(
            [(task.data_source, task.extra_info, score) for task, score in scored]
        )
        before = self._history.levels
        self._history = self._history.after(
            version.step, scores, curriculum.curriculum, curriculum.levels
        )
        await self._queue.admit(self.run, [], cursor=self._history.text(), wait_s=self._take_wait_s)
        levels: dict[str, float] = {}
        for task in curriculum.tasks:
            levels[f"{task}/level"] = self._history.levels.get(task, 0)
            if (score := scores.get((task, before.get(task, 0)))) is not None:
                levels[f"{task}/score"] = score
        return levels

    async def _admit(self, tasks: Sequence[Task], wait_s: float) -> int:
        """Admit as many of `tasks` as the run has room for, and return how many."""
        cursor = self._history.text() if self._curriculum else tasks[-1].task_id
        try:
            return await self._queue.admit(self.run, tasks, cursor=cursor, wait_s=wait_s)
        except WaitTimeoutError:
            if wait_s:
                await self._log_waits()
            return 0

    async def _answers(self, tasks: Sequence[Task]) -> tuple[list[Trajectory], int]:
        """Rows of `tasks`, and how many of the tasks were dead-lettered.

        Where the run has no room for all of them, the rest is admitted when those before it have left.
        """
        admitted, missing = 0, set[str]()
        rows: list[Trajectory] = []
        lost_tasks = 0
        while admitted < len(tasks) or missing:
            if admitted < len(tasks):
                rest = tasks[admitted:]
                count = await self._admit(rest, 0.0 if missing else self._take_wait_s)
                missing |= {task.task_id for task in rest[:count]}
                admitted += count
            batch_id = f"{self.run}/{self._epoch}.{self._step}"
            try:
                batch = await self._queue.take(
                    self.run,
                    epoch=self._epoch,
                    step=self._step,
                    # Without one of its own the run is full of a predecessor's.
                    groups=max(1, len(missing)),
                    batch_id=batch_id,
                    wait_s=self._take_wait_s,
                )
            except WaitTimeoutError:
                dead = {letter.uid.task for letter in await self._queue.dead_letters(self.run)}
                if not missing & dead:
                    await self._log_waits()
                lost_tasks += len(missing & dead)
                missing -= dead
                continue
            rows.extend(await self._read(batch, missing))
            missing -= {row.group for row in batch.rows}
            await self._queue.settle(
                self.run, epoch=self._epoch, step=self._step, batch_id=batch_id
            )
            self._step += 1
            await self._queue.commit(self.run, epoch=self._epoch, step=self._step)
        return rows, lost_tasks

    async def _read(self, batch: Batch, tasks: set[str]) -> list[Trajectory]:
        """The rows of a batch that belong to `tasks`; those of a predecessor's evaluation are settled unread."""
        uids = [row.uid for row in batch.rows if row.group in tasks]
        columns = await self._queue.fetch_rows(self.run, uids, COLUMNS)
        return [trajectory(uid, column) for uid, column in zip(uids, columns, strict=True)]

    async def _log_waits(self) -> None:
        waiting = await self._queue.why_waiting(self.run)
        blocking = "; ".join(
            f"{wait.who}: {wait.what} ({', '.join(wait.owners) or 'nobody'})"
            for wait in waiting[:3]
        )
        log.info("evaluation waits: %s", blocking or "the queue names nothing that blocks")


class EvaluationSchedule:
    """Starts evaluations and owns the running one.

    consumes: versions. waits for: the fleet to commit the version. produces: `val/…` metrics.
    """

    def __init__(
        self,
        evaluator: Evaluator,
        publisher: Publisher,
        settings: TrainerSettings,
        metrics: MetricsLog | None,
        status: LiveStatus,
    ) -> None:
        self._evaluator = evaluator
        self._publisher = publisher
        self._settings = settings
        self._metrics = metrics
        self._status = status
        self._draining = False
        self._running: asyncio.Task[None] | None = None
        self._last: Version | None = None

    async def open(self) -> None:
        """Declare the eval run and take it over."""
        await self._evaluator.open()

    async def start_if_due(self, version: Version) -> None:
        """Evaluate `version` if its step is due; raises the error of an evaluation that has failed."""
        if self._running and self._running.done():
            await self._end_of(self._running)
        config = self._settings.trainer
        due = (
            config.val_before_train
            if version.step == 0
            else config.test_freq > 0 and version.step % config.test_freq == 0
        )
        if not due or version == self._last or self._draining:
            return
        # The first evaluation is of the initial model: versions trained meanwhile must not answer it.
        if self._settings.blocking_evaluation or version.step == 0:
            await self.finish(version)
        elif self._running and not self._running.done():
            log.warning("evaluation of %s left out: that of %s still runs", version, self._last)
        else:
            self._start(version)

    async def finish(self, version: Version) -> None:
        """Wait for the running evaluation, then evaluate `version` unless it was of the same version."""
        if self._running:
            await self._end_of(self._running)
        if version != self._last and not self._draining:
            await self._end_of(self._start(version))

    def drain(self) -> None:
        """Cancel the running evaluation: engines may be draining too. Its rows leave with the next evaluation."""
        self._draining = True
        if self._running:
            self._running.cancel()

    @staticmethod
    async def _end_of(running: asyncio.Task[None]) -> None:
        await asyncio.wait({running})
        if not running.cancelled():
            running.result()

    def _start(self, version: Version) -> asyncio.Task[None]:
        self._last = version
        self._running = asyncio.create_task(self._evaluate(version), name=f"evaluate-{version}")
        return self._running

    async def _evaluate(self, version: Version) -> None:
        await self._publisher.drained()
        evaluation = await self._evaluator.evaluate(version)
        self._status.evaluated(evaluation.score)
        if self._metrics:
            self._metrics.write(version.step, evaluation.metrics())

    async def close(self) -> None:
        """Cancel the running evaluation; idempotent."""
        if self._running and not self._running.done():
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)
