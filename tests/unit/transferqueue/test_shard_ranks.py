"""Ranks with routers of their own over shards that answer in any order: one batch a step for all, and none torn."""

from __future__ import annotations

import asyncio
import random
from contextlib import AsyncExitStack, suppress
from typing import Any

import pytest

from meshrl.contract.errors import EndOfDataError
from meshrl.testing.contract.queue_actors import WAIT_S, Actors, batch_uids, spec, tasks
from meshrl.transferqueue.sharding import ShardedQueue, ShardQueue
from meshrl.transferqueue.stores.memory import MemoryStore

TASKS = 24
SHARDS = 3
RANKS = 3


class Shuffled:
    """A shard behind a network: each call and each answer takes a while, some less than others."""

    def __init__(self, shard: ShardQueue, dice: random.Random) -> None:
        self._shard, self._dice = shard, dice

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._shard, name)
        if not asyncio.iscoroutinefunction(found):
            return found

        async def call(*given: Any, **named: Any) -> Any:
            await self._some_time()
            answer = await found(*given, **named)
            await self._some_time()
            return answer

        return call

    async def _some_time(self) -> None:
        for _ in range(self._dice.choice((0, 0, 1, 3, 9, 40))):
            await asyncio.sleep(0)


async def batches_of(actors: Actors, groups: int, dice: random.Random, leads: bool) -> list[Any]:
    """Every step's rows; now and then a call is given up in the middle and made again. The first rank settles."""
    found: list[Any] = []
    for step in range(TASKS + 1):
        while True:
            taking = asyncio.ensure_future(actors.take(step, groups, WAIT_S))
            if dice.random() < 0.3:
                for _ in range(dice.randrange(60)):
                    await asyncio.sleep(0)
                taking.cancel()
            try:
                batch = await taking
            except asyncio.CancelledError:
                continue
            except EndOfDataError:
                return found
            break
        found.append(batch_uids(batch))
        if leads:
            await actors.settle(step)
    raise AssertionError("the data never end")


@pytest.mark.parametrize("seed", range(25))
async def test_all_ranks_get_the_same_batches_whatever_comes_first(seed: int) -> None:
    dice = random.Random(seed)
    async with AsyncExitStack() as stack:
        shards = [await ShardQueue.open(MemoryStore()) for _ in range(SHARDS)]
        for shard in shards:
            stack.push_async_callback(shard.close)
        ranks: list[Actors] = []
        for _ in range(RANKS):
            seen: list[Any] = [Shuffled(shard, dice) for shard in shards]
            router = ShardedQueue(seen)
            stack.push_async_callback(router.close)
            ranks.append(Actors(router))
        await ranks[0].start(spec(batch_groups=TASKS, max_staleness=float(TASKS)))
        groups = dice.randrange(1, 6)

        async def make() -> None:
            fed = 0
            while fed < TASKS:
                count = min(dice.randrange(1, 8), TASKS - fed)
                await ranks[0].feed(tasks(count, fed))
                await ranks[0].work()
                fed += count
            await ranks[0].queue.close_feed("run")

        making = asyncio.create_task(make())
        for actors in ranks:
            actors.epoch = ranks[0].epoch
        first, *others = await asyncio.gather(
            *(batches_of(actors, groups, dice, actors is ranks[0]) for actors in ranks)
        )
        await making
        assert all(other == first for other in others)
        rows = [row for batch in first for row in batch]
        assert len(rows) == len(set(rows)) == 2 * TASKS
        await ranks[0].publish(TASKS)
        await ranks[0].commit(TASKS)
        ledger = await ranks[0].ledger()
        assert (ledger.trained, sum(ledger.resident.values())) == (2 * TASKS, 0)
        with suppress(EndOfDataError):
            await ranks[1].take(TASKS, groups)
            raise AssertionError("a batch came after the end")
