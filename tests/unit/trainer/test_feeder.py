"""The feeder against the real queue: order, epochs, position."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from meshrl.contract.errors import UserError
from meshrl.contract.types import RunSpec, SamplingParams
from meshrl.trainer.data.feeder import Feeder
from meshrl.trainer.data.prompts import Prompt, PromptSet, task_maker
from meshrl.transferqueue import stores
from meshrl.transferqueue.config import QueueConfig
from meshrl.transferqueue.queue import TransferQueue

PROMPTS = PromptSet(
    prompts=tuple(Prompt(index=i, prompt_ids=np.array([i], np.int32)) for i in range(10)),
    skipped=0,
    fingerprint="ten",
)


async def open_queue(path: Path) -> TransferQueue:
    config = QueueConfig.model_validate({"store": "memory"})
    queue = await TransferQueue.open(stores.build(config, path))
    await queue.open_run(
        RunSpec(run="r", group_size=1, batch_groups=2, max_staleness=1.0, lease_ttl_s=30)
    )
    return queue


def feeder(queue: TransferQueue, *, epochs: int | None = 2, seed: int = 0) -> Feeder:
    make = task_maker(
        "r", group_size=1, sampling=SamplingParams(), program="single_turn", deadline_s=60
    )
    return Feeder(queue, "r", PROMPTS, make, epochs=epochs, shuffle=True, seed=seed)


async def eat(queue: TransferQueue, count: int) -> list[str]:
    """Fail rows for good, so that admission goes on without a trainer; their task ids in order."""
    from meshrl.contract.types import Outcome, Version

    eaten: list[str] = []
    while len(eaten) < count:
        lease = await queue.lease(
            ["r"], "rollout", worker="w", limit=1, version=Version(0, 0), wait_s=5
        )
        for row in lease.rows:
            await queue.fail("r", "rollout", row.uid, row.token, Outcome.CANCELLED, "eaten")
            if row.delivery == 3:
                eaten.append(row.uid.task)
    return eaten


async def test_every_prompt_comes_once_an_epoch_and_then_the_feed_closes(tmp_path: Path) -> None:
    queue = await open_queue(tmp_path)
    feeding = asyncio.create_task(feeder(queue).run())
    eaten = await eat(queue, 20)
    await asyncio.wait_for(feeding, 120)
    assert sorted(eaten[:10]) == sorted(f"0-{i}" for i in range(10))
    assert sorted(eaten[10:]) == sorted(f"1-{i}" for i in range(10))
    assert [int(e[2:]) for e in eaten[:10]] != [int(e[2:]) for e in eaten[10:]]
    assert (await queue.run_state("r")).feed_closed
    await queue.close()


async def test_a_restarted_feeder_repeats_and_skips_nothing(tmp_path: Path) -> None:
    queue = await open_queue(tmp_path)
    first = asyncio.create_task(feeder(queue).run())
    eaten = await eat(queue, 7)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    second = asyncio.create_task(feeder(queue).run())
    eaten += await eat(queue, 13)
    await asyncio.wait_for(second, 120)
    assert len(eaten) == len(set(eaten)) == 20
    await queue.close()


async def test_other_data_under_the_same_run_are_refused(tmp_path: Path) -> None:
    queue = await open_queue(tmp_path)
    stopping = feeder(queue, epochs=None)
    feeding = asyncio.create_task(stopping.run())
    await eat(queue, 70)
    stopping.stop()
    await asyncio.wait_for(feeding, 120)
    with pytest.raises(UserError, match="was fed seed 0, now it is 1"):
        await feeder(queue, epochs=None, seed=1).run()
    await queue.close()
