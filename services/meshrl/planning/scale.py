"""A whole fleet in virtual time: the real queue, called without codec and network, among paced engines, one trainer.

    feeder ──admit──▶ queue ──lease──▶ worker 0 … N-1 ──write──▶ queue ──take──▶ trainer ──▶ versions, to every worker
                        └──lease──▶ reward service ──write──▶ queue

Admission, leases, fair shares, staleness and batches are the product's. A worker is a slot count and an engine whose
requests share its speed; a step, a transfer, a reward and a tool call are spans of time. Each call of the queue takes
its measured processor time, one call after the other. So a thousand workers need seconds, and one seed is one result.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import selectors
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from meshrl.contract.errors import MeshError
from meshrl.contract.types import RunSpec, SamplingParams, Task, Version
from meshrl.planning.setting import Setting
from meshrl.planning.stages import (
    FIRST,
    NEVER_S,
    RUN,
    STAGES,
    PacedWorker,
    PricedQueue,
    RewardService,
)
from meshrl.transferqueue.queue import TransferQueue
from meshrl.transferqueue.stores.memory import MemoryStore

FEWEST_STEPS: Final = 9
STEADY_ROWS: Final = 300
"""Fewer rows say little about a rate."""
STEADY: Final = 0.03
"""Two rates that differ by less are the same one."""
STEADY_AGE: Final = 0.1
"""The same for mean staleness, in steps."""


class StuckError(MeshError):
    """Nothing will ever happen in the simulated mesh: its parts wait for each other."""


class _Clock(selectors.SelectSelector):
    """A wait of the event loop is over at once, and the clock has moved."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        """Nothing is ever ready. Raises StuckError once nothing is due."""
        if timeout is None or (timeout > 0 and self.now > NEVER_S / 2):
            raise StuckError("the simulated mesh waits for itself: a defect of meshrl plan")
        if timeout > 0:
            self.now = max(self.now + timeout, math.nextafter(self.now, math.inf))
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """Jumps from timer to timer; what is due at once comes in the order in which it was asked for."""

    def __init__(self) -> None:
        self._clock = _Clock()
        super().__init__(self._clock)

    def time(self) -> float:
        """Virtual seconds since the start."""
        return self._clock.now

    @property
    def _clock_resolution(self) -> float:
        """Seconds by which a timer may be early: asyncio's nanosecond is lost in the rounding of a year."""
        return 2 * math.ulp(self._clock.now)

    @_clock_resolution.setter
    def _clock_resolution(self, measured: float) -> None:
        del measured  # of the machine's own clock


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """The result of a setting, from the end of the warm-up on."""

    samples_per_h: float
    tokens_per_s: float
    staleness_mean: float
    staleness_p99: int
    staleness: dict[int, float]
    """Steps between sampling and training, to their share of the rows."""
    trainer_idle: float
    """Share of the time in which the trainer waits for rows or for a transfer."""
    publish_wait: float
    """Share of the time in which it waits for the transfer before."""
    rollout_idle: float
    """Share of the tokens that the fleet could sample and does not."""
    slots_held: float
    """Share of the slots that hold a row, also while its tools work."""
    reward_load: float
    """Share of the time in which the busiest part of the reward scores as much at once as it can."""
    queue_load: float
    """Share of the time in which the queue's processor is busy."""
    steps: int


@dataclass(slots=True, kw_only=True)
class _Sums:
    """Sums from the start to the end of a step."""

    at: float = 0.0
    rows: int = 0
    age: int = 0
    """Staleness of all rows together."""
    waited_s: float = 0.0
    publish_s: float = 0.0
    tokens: float = 0.0
    held_s: float = 0.0
    scored_s: float = 0.0
    queue_s: float = 0.0


class _SimulatedMesh:
    """All parts of one run, and the sums that they leave."""

    def __init__(self, setting: Setting, queue: TransferQueue) -> None:
        self._setting = setting
        self._queue = queue
        self._priced = PricedQueue(setting, queue)
        self._workers = [PacedWorker(number, self._priced) for number in range(setting.workers)]
        self._reward = RewardService(self._priced)
        self._sums = _Sums()
        self._ages: list[Counter[int]] = []
        """Staleness of the rows of each step."""

    async def run(self) -> Outlook:
        """Wait until the rate is steady."""
        setting, queue = self._setting, self._queue
        queue.end_no_lease()  # nobody fails here, and the watch over leases costs time by the clock
        resident = setting.resident_groups * setting.group * setting.lengths.mean
        await queue.open_run(
            RunSpec(
                run=RUN,
                group_size=setting.group,
                batch_groups=setting.batch_groups,
                max_staleness=setting.max_staleness,
                stages=STAGES if setting.reward else STAGES[:1],
                resident_batches=setting.resident_batches,
                resident_bytes=1 << 40,
                resident_tokens=math.ceil(resident) if resident < 1 << 40 else 0,
                max_attempts=1 << 20,
            )
        )
        await queue.acquire(RUN, "trainer")
        await queue.publish(RUN, FIRST)
        parts = [self._feed()]
        parts += [work() for worker in self._workers for work in (worker.lease, worker.write)]
        if setting.reward:
            parts.append(self._reward.work())
        training = asyncio.create_task(self._train())
        beside = [asyncio.create_task(part) for part in parts]
        try:
            await asyncio.wait([training, *beside], return_when=asyncio.FIRST_COMPLETED)
            for part in beside:
                if part.done():  # by an error only
                    part.result()
            return training.result()
        finally:
            for task in (training, *beside):
                task.cancel()
            await asyncio.gather(training, *beside, return_exceptions=True)

    async def _feed(self) -> None:
        setting = self._setting
        some = max(1, min(64, setting.batch_groups))
        prompt = np.zeros(1, np.int32)
        sampling = SamplingParams(max_tokens=setting.lengths.most)
        for start in itertools.count(0, some):
            tasks = [
                Task(
                    run=RUN,
                    task_id=str(number),
                    prompt_ids=prompt,
                    group_size=setting.group,
                    sampling=sampling,
                )
                for number in range(start, start + some)
            ]
            while tasks:
                done = await self._queue.admit(RUN, tasks, cursor=str(start), wait_s=NEVER_S)
                await self._priced.processor.spend(rows=done)
                tasks = tasks[done:]

    async def _train(self) -> Outlook:
        """Take, step, settle; a version travels beside the next step, one at a time."""
        setting, sums, queue = self._setting, self._sums, self._queue
        processor, clock = self._priced.processor, self._priced.clock
        marks = [self._mark()]
        publishing: asyncio.Task[None] | None = None
        while not self._seen_enough(marks):
            step = len(marks) - 1
            began = clock()
            batch = await queue.take(
                RUN,
                epoch=1,
                step=step,
                groups=setting.batch_groups,
                batch_id=f"b{step}",
                wait_s=NEVER_S,
            )
            rows = len(batch.rows)
            await processor.spend(calls=1 + setting.ranks, rows=2 * rows)
            sums.waited_s += clock() - began
            await asyncio.sleep(setting.step_s)
            await processor.spend(calls=2)
            await queue.settle(RUN, epoch=1, step=step, batch_id=batch.batch_id)
            ages = Counter(step - row.oldest.step for row in batch.rows)
            self._ages.append(ages)
            sums.rows += rows
            sums.age += sum(age * count for age, count in ages.items())
            if publishing is not None:
                began = clock()
                await publishing
                sums.publish_s += clock() - began
            publishing = asyncio.create_task(self._publish(Version(1, step + 1)))
            marks.append(self._mark())
        return self._outlook(marks)

    async def _publish(self, version: Version) -> None:
        await asyncio.sleep(self._setting.transfer_s)
        await asyncio.gather(*(worker.update(version) for worker in self._workers))
        self._priced.published = version
        await self._priced.processor.spend()
        await self._queue.publish(RUN, version)
        await self._queue.commit(RUN, epoch=1, step=version.step)

    def _mark(self) -> _Sums:
        """The sums of now."""
        for worker in self._workers:
            worker.gpu.advance()
            worker.count()
        return replace(
            self._sums,
            at=self._priced.clock(),
            tokens=sum(worker.gpu.tokens for worker in self._workers),
            held_s=sum(worker.held_s for worker in self._workers),
            scored_s=self._reward.busy_s,
            queue_s=self._priced.processor.busy_s,
        )

    def _seen_enough(self, marks: Sequence[_Sums]) -> bool:
        """Whether the second third of the steps was as the last one, or many rows have been trained."""
        steps = len(marks) - 1
        if steps < FEWEST_STEPS:
            return False
        if marks[-1].rows >= self._setting.most_rows:
            return True
        cuts = marks[steps // 3], marks[2 * steps // 3], marks[-1]
        parts = list(itertools.pairwise(cuts))
        if any(end.rows - begin.rows < STEADY_ROWS for begin, end in parts):
            return False
        rates = [(end.rows - begin.rows) / (end.at - begin.at) for begin, end in parts]
        ages = [(end.age - begin.age) / (end.rows - begin.rows) for begin, end in parts]
        return abs(rates[1] / rates[0] - 1) < STEADY and abs(ages[1] - ages[0]) < STEADY_AGE

    def _outlook(self, marks: Sequence[_Sums]) -> Outlook:
        """Sums from the end of the first third of the steps on."""
        setting, first = self._setting, (len(marks) - 1) // 3
        since, now = marks[first], marks[-1]
        lasted, rows = now.at - since.at, now.rows - since.rows
        tokens, publish_s = now.tokens - since.tokens, now.publish_s - since.publish_s
        ages = sum(self._ages[first:], Counter[int]())
        return Outlook(
            samples_per_h=3600 * rows / lasted,
            tokens_per_s=tokens / lasted,
            staleness_mean=(now.age - since.age) / rows,
            staleness_p99=percentile(ages, 0.99),
            staleness={age: ages[age] / rows for age in sorted(ages)},
            trainer_idle=(now.waited_s - since.waited_s + publish_s) / lasted,
            publish_wait=publish_s / lasted,
            rollout_idle=max(0.0, 1 - tokens / (lasted * setting.workers * setting.tokens_per_s)),
            slots_held=(now.held_s - since.held_s) / (lasted * setting.workers * setting.slots),
            reward_load=(now.scored_s - since.scored_s) / lasted,
            queue_load=(now.queue_s - since.queue_s) / lasted,
            steps=len(marks) - 1,
        )


def percentile(counts: Counter[int], share: float) -> int:
    """The smallest value that `share` of what was counted does not exceed."""
    left = share * counts.total()
    for value in sorted(counts):
        left -= counts[value]
        if left <= 0:
            return value
    return max(counts, default=0)


def run_setting(setting: Setting) -> Outlook:
    """Train in virtual time until the rate is steady. Equal settings have equal outlooks."""

    async def simulate() -> Outlook:
        queue = await TransferQueue.open(MemoryStore())
        try:
            return await _SimulatedMesh(setting, queue).run()
        finally:
            await queue.close()

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(simulate())
