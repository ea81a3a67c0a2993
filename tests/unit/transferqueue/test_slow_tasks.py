"""Tasks that sample for longer than the staleness window, in virtual time."""

from __future__ import annotations

import asyncio
import itertools
import math
import random
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import pytest

from meshrl.contract.errors import WaitTimeoutError
from meshrl.contract.types import ROLLOUT_STAGE, Lease, LeasedRow, Ledger, StalePolicy
from meshrl.testing.contract.queue_actors import Actors, rollout_of, spec, tasks, tokens_of
from meshrl.transferqueue.queue import TransferQueue
from meshrl.transferqueue.stores.memory import MemoryStore
from tests.simulation.loop import SimulatedLoop

STEPS = 40
BATCH = 10
STEP_S = 20.0
"""A step of the trainer; a token takes a second."""
SHORT, LONG = 10, 100
"""The longest responses; every tenth task is long."""


@dataclass
class Mesh:
    """A feeder, a fleet with a slot for each row, and a trainer."""

    actors: Actors
    sampled: Counter[int] = field(default_factory=Counter)
    """Rows by length, of every attempt that was written."""
    trained: Counter[int] = field(default_factory=Counter)
    ages: Counter[int] = field(default_factory=Counter)
    """Trained rows by staleness."""

    async def run(self) -> None:
        """Train to the end; an error of the feeder or of the fleet is the test's."""
        async with asyncio.TaskGroup() as others:
            beside = [others.create_task(self._feed()), others.create_task(self._lease())]
            await self._train()
            for work in beside:
                work.cancel()

    async def _train(self) -> None:
        for step in range(STEPS):
            batch = await self.actors.take(step, groups=BATCH, wait_s=1000 * STEP_S)
            await asyncio.sleep(STEP_S)
            await self.actors.settle(step)
            self.ages.update(step - row.oldest.step for row in batch.rows)
            self.trained.update(row.num_tokens for row in batch.rows)
            await self.actors.publish(step + 1)
            await self.actors.commit(step + 1)

    async def _feed(self) -> None:
        for start in itertools.count(0, BATCH):
            left = tasks(BATCH, start)
            while left:
                with suppress(WaitTimeoutError):
                    left = left[await self.actors.feed(left, wait_s=1000 * STEP_S) :]

    async def _lease(self) -> None:
        async with asyncio.TaskGroup() as slots:
            while True:
                with suppress(WaitTimeoutError):
                    lease = await self.actors.lease(wait_s=STEP_S / 4)
                    for row in lease.rows:
                        slots.create_task(self._sample(lease, row))

    async def _sample(self, lease: Lease, row: LeasedRow) -> None:
        version = self.actors.version
        most = LONG if int(row.uid.task[1:]) % 10 == 3 else SHORT
        tokens = math.ceil(most * random.Random(str(row.uid)).uniform(0.5, 1.0))
        await asyncio.sleep(tokens)
        self.sampled[tokens] += 1
        written = [rollout_of(row, version, tokens)]
        await self.actors.queue.write_rows("run", "rollout", tokens_of(lease), written)


def simulated(**changes: Any) -> tuple[Mesh, Ledger]:
    """The mesh at its end; the ledger balances."""

    async def simulate() -> tuple[Mesh, Ledger]:
        queue = await TransferQueue.open(MemoryStore())
        actors = Actors(queue)
        given = {"batch_groups": BATCH, "lease_ttl_s": 1e9, "stages": (ROLLOUT_STAGE,), **changes}
        await actors.start(spec(**given))
        mesh = Mesh(actors)
        await mesh.run()
        ledger = await actors.ledger()
        await queue.close()
        return mesh, ledger

    loop = SimulatedLoop(7)
    try:
        return loop.run_until_complete(simulate())
    finally:
        loop.close()


def share(lengths: Counter[int], at_most: int) -> float:
    """The share of the rows that have at most so many tokens."""
    return sum(rows for length, rows in lengths.items() if length <= at_most) / lengths.total()


def mean(lengths: Counter[int]) -> float:
    return sum(length * rows for length, rows in lengths.items()) / lengths.total()


@pytest.mark.parametrize("max_staleness", [1, 2])
def test_a_tenth_that_samples_longer_than_the_window_is_trained_as_often_as_it_is_sampled(
    max_staleness: int,
) -> None:
    mesh, ledger = simulated(max_staleness=float(max_staleness))
    assert not ledger.stale, "nothing is sampled without use, and nothing again and again"
    assert mean(mesh.trained) == pytest.approx(mean(mesh.sampled), rel=0.05)
    farthest = max(abs(share(mesh.trained, n) - share(mesh.sampled, n)) for n in range(LONG + 1))
    assert farthest <= 0.05
    assert max(mesh.ages) <= max_staleness


def test_a_run_that_drops_what_is_too_old_waits_for_no_task() -> None:
    mesh, ledger = simulated(max_staleness=1.0, stale_policy=StalePolicy.DROP)
    assert set(ledger.stale) == {"dropped"}
    assert max(mesh.trained) <= SHORT
    assert max(mesh.ages) <= 1
