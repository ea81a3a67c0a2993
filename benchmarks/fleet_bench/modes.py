"""Synchronous, one step off, bounded and fully asynchronous training of the long-tailed agent, on the same hardware.

Four devices. Two sample (32 agents each at a time) and two train, STEP_S a step; or, colocated, all four do the
one and then the other: twice the slots, half the step. The trainer is a stub that sleeps, around the queue's
real operations: take, settle, publish, commit. A new version takes SYNC_S to travel; then each engine commits it, by
`on_update`. From mode to mode one thing is added:

    synchronous   staleness 0   a batch is sampled, trained, published; then the next
    + overlap     staleness 1   the next batch is sampled while this one is trained; updates wait for what runs
    + streaming   staleness 4   groups are taken as they are finished, whichever batch they came in with
    + partial     staleness 4   updates wait for nothing: running responses go on under the new version
    fully async   no bound but for what may be resident
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fleet_bench.parts import FIRST, GROUP, RUN, Replica, engine, feeding, open_queue, task
from fleet_bench.parts import serve_version as commit_version

from meshrl.contract.types import Batch, OnUpdate, Version
from meshrl.transferqueue.queue import TransferQueue

BATCH_GROUPS = 8
SLOTS, TOKENS_PER_S = 32, 200.0
STEP_S, SYNC_S = 1.0, 0.2
WARM_UP_STEPS = 2
DRAIN, GO_ON = OnUpdate.DRAIN, OnUpdate.IN_FLIGHT


@dataclass(frozen=True, slots=True, kw_only=True)
class Mode:
    """One way to train."""

    name: str
    max_staleness: float
    on_update: OnUpdate
    colocated: bool = False


MODES = (
    Mode(name="synchronous, colocated", max_staleness=0, on_update=DRAIN, colocated=True),
    Mode(name="synchronous", max_staleness=0, on_update=DRAIN),
    Mode(name="+ overlap (one step off)", max_staleness=1, on_update=DRAIN),
    Mode(name="+ streaming (bounded by 4)", max_staleness=4, on_update=DRAIN),
    Mode(name="+ partial rollout (bounded by 4)", max_staleness=4, on_update=GO_ON),
    Mode(name="fully asynchronous", max_staleness=math.inf, on_update=GO_ON),
)


class Trainer:
    """The stub: a step is a sleep, everything around it is real."""

    def __init__(self, queue: TransferQueue, replicas: Sequence[Replica], mode: Mode) -> None:
        self.rows = 0
        self.steps = 0
        self.waited_s = 0.0
        self.staleness: list[int] = []
        self._stepped = asyncio.Condition()
        self._queue = queue
        self._replicas = replicas
        self._mode = mode
        self._step_s = STEP_S / 2 if mode.colocated else STEP_S

    async def run(self) -> None:
        """Take, step, settle; publish beside the next step."""
        clock = asyncio.get_running_loop().time
        publishing: asyncio.Task[None] | None = None
        try:
            while True:
                step, batch_id = self.steps, f"b{self.steps}"
                began = clock()
                batch = await self._take(step, batch_id)
                self.waited_s += clock() - began
                await asyncio.sleep(self._step_s)
                await self._queue.settle(RUN, epoch=1, step=step, batch_id=batch_id)
                self.staleness += [step - row.oldest.step for row in batch.rows]
                self.rows += len(batch.rows)
                async with self._stepped:
                    self.steps += 1
                    self._stepped.notify_all()
                if publishing is not None:
                    await publishing
                publishing = asyncio.create_task(self._publish(Version(1, step + 1)))
        finally:
            if publishing is not None:
                publishing.cancel()
                await asyncio.gather(publishing, return_exceptions=True)

    async def reaches(self, step: int, training: asyncio.Task[None]) -> None:
        """Wait for `step`, or raise what ended `training`."""
        async with self._stepped:
            while self.steps < step:
                await asyncio.wait_for(self._stepped.wait(), 120)
                if training.done():
                    training.result()

    async def _take(self, step: int, batch_id: str) -> Batch:
        return await self._queue.take(
            RUN, epoch=1, step=step, groups=BATCH_GROUPS, batch_id=batch_id, wait_s=600
        )

    async def _publish(self, version: Version) -> None:
        await asyncio.sleep(SYNC_S)
        await asyncio.gather(
            *(commit_version(each.engine, version, self._mode.on_update) for each in self._replicas)
        )
        await self._queue.publish(RUN, version)
        await self._queue.commit(RUN, epoch=1, step=version.step)


async def train(mode: Mode, seconds: float) -> dict[str, Any]:
    """Trained samples an hour in one mode, from the end of the first steps on."""
    clock = asyncio.get_running_loop().time
    async with open_queue(batch_groups=BATCH_GROUPS, max_staleness=mode.max_staleness) as queue:
        slots = SLOTS * (2 if mode.colocated else 1)
        replicas = [
            Replica(queue, f"w{n}", engine(slots=slots, tokens_per_s=TOKENS_PER_S), slots)
            for n in range(2)
        ]
        for replica in replicas:
            await replica.start(FIRST)
        trainer = Trainer(queue, replicas, mode)
        most = 1 << 20
        async with feeding(
            queue, lambda number: task(number, max_tokens=most, program="fleet_bench.agent")
        ):
            training = asyncio.create_task(trainer.run())
            await trainer.reaches(WARM_UP_STEPS, training)
            rows, waited, began = trainer.rows, trainer.waited_s, clock()
            while clock() - began < seconds:  # up to the end of a step: no part of one is counted
                await trainer.reaches(trainer.steps + 1, training)
            lasted = clock() - began
            report = {
                "mode": mode.name,
                "samples_per_hour": 3600 * (trainer.rows - rows) / lasted,
                "trainer_waits": (trainer.waited_s - waited) / lasted,
                "mean_staleness": sum(trainer.staleness) / len(trainer.staleness),
                "max_staleness": max(trainer.staleness),
                "balanced": (await queue.ledger(RUN)).balanced,
            }
            training.cancel()
            await asyncio.gather(training, return_exceptions=True)
        for replica in replicas:
            await replica.leave()
    return report


async def measure(seconds: float) -> dict[str, Any]:
    """All modes, one after the other, and what each adds."""
    modes = [await train(mode, seconds) for mode in MODES]
    speed = {report["mode"]: report["samples_per_hour"] for report in modes}
    full, colocated, apart = (
        speed[MODES[5].name],
        speed[MODES[0].name],
        speed[MODES[1].name],
    )
    return {
        "modes": modes,
        "overlap_gains": speed[MODES[2].name] / apart,
        "streaming_gains": speed[MODES[3].name] / speed[MODES[2].name],
        "partial_rollout_gains": speed[MODES[4].name] / speed[MODES[3].name],
        "full_over_synchronous": full / apart,
        "full_over_synchronous_colocated": full / colocated,
        "rows_per_step": BATCH_GROUPS * GROUP,
    }
