"""Throughput while the fleet goes 1, 2, 4, 2, 1: tokens of finished rows over what so many replicas could make.

A replica that joins starts, takes the newest version and leases; one that leaves drains, and the others go on
with its responses from what the journal kept. A consumer takes and settles what is complete.
"""

from __future__ import annotations

import asyncio
from typing import Any

from fleet_bench.parts import FIRST, RUN, Replica, engine, feeding, open_queue, task

from meshrl.contract.errors import WaitTimeoutError
from meshrl.contract.types import Version
from meshrl.transferqueue.queue import TransferQueue

PHASES = (1, 2, 4, 2, 1)
SLOTS, TOKENS_PER_S = 16, 50.0
SHORTEST, LONGEST = 64, 192
"""Tokens of a response; group by group, evenly spread."""
WARM_UP_S = 6.0


def tokens_of(number: int) -> int:
    """Response tokens of the rows of task `number`."""
    return SHORTEST + (number * 7919) % (LONGEST - SHORTEST + 1)


class Consumer:
    """Takes complete groups as a trainer does, and counts their tokens."""

    def __init__(self, queue: TransferQueue) -> None:
        self.tokens = 0
        self._queue = queue

    async def run(self) -> None:
        """Run until cancelled."""
        step = 0
        while True:
            batch_id = f"b{step}"
            try:
                batch = await self._queue.take(
                    RUN, epoch=1, step=step, groups=1, batch_id=batch_id, wait_s=5
                )
            except WaitTimeoutError:
                continue
            self.tokens += sum(row.num_tokens - 8 for row in batch.rows)
            await self._queue.settle(RUN, epoch=1, step=step, batch_id=batch_id)
            step += 1
            await self._queue.publish(RUN, Version(1, step))
            await self._queue.commit(RUN, epoch=1, step=step)


async def measure(phase_s: float) -> dict[str, Any]:
    """Tokens by phase and in all, against the ideal."""
    async with (
        open_queue(batch_groups=1, max_staleness=1_000) as queue,
        feeding(queue, lambda number: task(number, max_tokens=tokens_of(number))),
    ):
        replicas: list[Replica] = []
        consumer = Consumer(queue)
        consuming = asyncio.create_task(consumer.run())
        clock = asyncio.get_running_loop().time

        async def resize(count: int) -> None:
            while len(replicas) < count:
                made = engine(slots=SLOTS, tokens_per_s=TOKENS_PER_S)
                replica = Replica(queue, f"w{clock():.3f}", made, SLOTS)
                await replica.start(FIRST)
                replicas.append(replica)
            leaving = replicas[count:]
            del replicas[count:]
            await asyncio.gather(*(replica.leave() for replica in leaving))

        await resize(PHASES[0])
        await asyncio.sleep(WARM_UP_S)
        phases, ideal, began = [], 0.0, consumer.tokens
        for count in PHASES:
            start, tokens = clock(), consumer.tokens
            await resize(count)
            await asyncio.sleep(max(0.0, start + phase_s - clock()))
            seconds = clock() - start
            could = count * SLOTS * TOKENS_PER_S * seconds
            ideal += could
            done = consumer.tokens - tokens
            phases.append({"replicas": count, "share_of_ideal": done / could})
        made_tokens = consumer.tokens - began
        ledger = await queue.ledger(RUN)
        await resize(0)
        consuming.cancel()
        await asyncio.gather(consuming, return_exceptions=True)
    return {
        "area": made_tokens / ideal,
        "phases": phases,
        "phase_s": phase_s,
        "balanced": ledger.balanced,
        "dead_lettered": sum(ledger.dead_lettered.values()),
    }
