"""When evaluations run: one at a time, beside training or, for on-policy runs, between two steps."""

from __future__ import annotations

import asyncio
import logging

from meshrl.contract.ports import Publisher
from meshrl.contract.types import Version
from meshrl.trainer.loop.evaluation import Evaluator
from meshrl.trainer.loop.settings import TrainerSettings
from meshrl.trainer.loop.status import LiveStatus
from meshrl.trainer.metrics.log import MetricsLog

log = logging.getLogger(__name__)


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
