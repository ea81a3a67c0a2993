"""The queue that we ship for other people's tests."""

from __future__ import annotations

from meshrl.client import Queue
from meshrl.contract.types import ROLLOUT_STAGE, RunSpec
from meshrl.testing.queue import memory_queue, queue_service

SPEC = RunSpec(run="mine", group_size=1, batch_groups=1, max_staleness=0.0, stages=(ROLLOUT_STAGE,))


async def test_a_queue_in_memory_keeps_a_ledger_of_its_run() -> None:
    async with memory_queue([SPEC]) as queue:
        assert (await queue.ledger("mine")).balanced


async def test_the_same_queue_answers_the_client_over_grpc() -> None:
    async with queue_service([SPEC]) as address, Queue.connect(address) as queue:
        run = await queue.open_run(SPEC)
        assert (await run.ledger()).admitted == 0
