"""Ranks of one trainer, each with a router of its own, over queue processes that get rows all the while."""

from __future__ import annotations

import asyncio

import pytest

from meshrl.rpc.queue_connection import connect_queue
from meshrl.testing.contract.queue_actors import WAIT_S, Actors, batch_uids, spec, tasks
from meshrl.transferqueue.sharding.batches import ShardedBatches
from meshrl.transferqueue.sharding.shard import BatchPlan

STEPS = 12
GROUPS = 3


async def test_ranks_get_the_same_batches_and_every_row_is_trained_once(
    addresses: list[str],
) -> None:
    async with (
        connect_queue(",".join(addresses)) as queue,
        connect_queue(",".join(addresses)) as another,
    ):
        first, second = Actors(queue), Actors(another)
        await first.start(spec(batch_groups=STEPS * GROUPS, max_staleness=float(STEPS)))
        second.epoch = first.epoch

        async def make() -> None:
            for number in range(STEPS * GROUPS):
                await first.feed(tasks(1, number))
                await first.work()

        seen: list[str] = []
        async with asyncio.TaskGroup() as group:
            group.create_task(make())
            for step in range(STEPS):
                ranks = (actors.take(step, GROUPS, WAIT_S) for actors in (first, second))
                one, other = map(batch_uids, await asyncio.gather(*ranks))
                assert one == other
                seen += one
                await first.settle(step)
        await first.publish(STEPS)
        await first.commit(STEPS)
        ledger = await first.ledger()
        assert len(set(seen)) == len(seen) == ledger.trained
        assert sum(ledger.resident.values()) == 0


async def test_a_rank_that_has_planned_otherwise_gets_the_recorded_plan(
    addresses: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with (
        connect_queue(",".join(addresses)) as queue,
        connect_queue(",".join(addresses)) as another,
    ):
        first, second = Actors(queue), Actors(another)
        await first.start(spec(batch_groups=9))
        second.epoch = first.epoch
        await first.feed(tasks(9))
        await first.work()
        given = await first.take(0, GROUPS)
        monkeypatch.setattr(ShardedBatches, "_plan", lambda *_: BatchPlan(9, ((1, GROUPS),)))
        assert batch_uids(await second.take(0, GROUPS)) == batch_uids(given)
