"""The feeder against the real queue: order, epochs, position."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshrl.contract.errors import UserError
from meshrl.contract.types import RunSpec, SamplingParams
from meshrl.trainer.data.feeder import Feeder, PromptOrder
from meshrl.trainer.data.prompts import Prompt, PromptSet, task_maker
from meshrl.transferqueue import stores
from meshrl.transferqueue.config import QueueConfig
from meshrl.transferqueue.queue import TransferQueue

PROMPTS = PromptSet(
    prompts=tuple(
        Prompt(index=i, prompt_ids=np.array([i], np.int32), data_source="ab"[i > 2])
        for i in range(10)
    ),
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


def feeder(
    queue: TransferQueue, *, epochs: int | None = 2, seed: int = 0, **options: Any
) -> Feeder:
    make = task_maker(
        "r", group_size=1, sampling=SamplingParams(), program="single_turn", deadline_s=60
    )
    asked = {key: options.pop(key) for key in ("weights", "curriculum") if key in options}
    order = PromptOrder(shuffle=True, seed=seed, **asked)
    return Feeder(queue, "r", PROMPTS, make, epochs=epochs, order=order, **options)


async def eat(queue: TransferQueue, count: int) -> list[str]:
    """Dead-letter rows, so that admission continues without a trainer; their task ids in order."""
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


@pytest.mark.parametrize("weights", [None, {"a": 1.0, "b": 1.0}])
async def test_a_restarted_feeder_repeats_and_skips_nothing(
    tmp_path: Path, weights: dict[str, float] | None
) -> None:
    queue = await open_queue(tmp_path)
    first = asyncio.create_task(feeder(queue, weights=weights, chunk=3).run())
    eaten = await eat(queue, 7)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    second = asyncio.create_task(feeder(queue, weights=weights, chunk=3).run())
    eaten += await eat(queue, 13)
    await asyncio.wait_for(second, 120)
    assert len(eaten) == len(set(eaten)) == 20
    if (
        weights
    ):  # ten of each source: every prompt of the small one three times, one of them a fourth time
        of_a = Counter(int(name.split("-")[1]) for name in eaten if int(name.split("-")[1]) < 3)
        assert sorted(of_a.values()) == [3, 3, 4]
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
    with pytest.raises(UserError, match="was fed weights None, now it is"):
        await feeder(queue, epochs=None, weights={"a": 1.0, "b": 1.0}).run()
    await queue.close()


@pytest.mark.parametrize("options", [{"weights": {"a": 1.0, "b": 1.0}}, {"curriculum": "length"}])
async def test_an_order_that_is_left_out_later_is_another_order(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    queue = await open_queue(tmp_path)
    stopping = feeder(queue, epochs=None, **options)
    feeding = asyncio.create_task(stopping.run())
    await eat(queue, 70)
    stopping.stop()
    await asyncio.wait_for(feeding, 120)
    with pytest.raises(UserError, match=f"was fed {next(iter(options))} .*, now it is None"):
        await feeder(queue, epochs=None).run()
    await queue.close()


async def test_other_data_that_were_accepted_are_fed_from_their_beginning_with_new_names(
    tmp_path: Path,
) -> None:
    queue = await open_queue(tmp_path)
    names: list[str] = []
    for seed, count in ((0, 7), (1, 13), (0, 10)):
        stopping = feeder(queue, epochs=None, seed=seed, chunk=1, accept_changes=True)
        feeding = asyncio.create_task(stopping.run())
        names += await eat(queue, count)
        stopping.stop()
        await asyncio.wait_for(feeding, 120)
    assert len(names) == len(set(names)) == 30
    again = feeder(queue, epochs=None, seed=0, chunk=1)
    feeding = asyncio.create_task(again.run())
    names += await eat(queue, 10)
    again.stop()
    await asyncio.wait_for(feeding, 120)
    assert len(names) == len(set(names)), "a start without a change continues where it was"
    await queue.close()


async def test_other_data_are_noticed_from_the_first_task_on(tmp_path: Path) -> None:
    queue = await open_queue(tmp_path)
    stopping = feeder(queue, epochs=None)
    feeding = asyncio.create_task(stopping.run())
    names = await eat(queue, 2)
    stopping.stop()
    await asyncio.wait_for(feeding, 120)
    with pytest.raises(UserError, match="was fed seed 0, now it is 1"):
        await feeder(queue, epochs=None, seed=1).run()
    stopping = feeder(queue, epochs=None, seed=1, accept_changes=True)
    feeding = asyncio.create_task(stopping.run())
    names += await eat(queue, 12)
    stopping.stop()
    await asyncio.wait_for(feeding, 120)
    assert len(set(names)) == 14
    assert len({name for name in names if int(name.split("-")[0]) > 1}) >= 8
    await queue.close()


async def test_fewer_data_that_were_accepted_end_the_feed_where_all_epochs_are_through(
    tmp_path: Path,
) -> None:
    queue = await open_queue(tmp_path)
    first = feeder(queue, epochs=2, chunk=1)
    feeding = asyncio.create_task(first.run())
    await eat(queue, 12)
    first.stop()
    await asyncio.wait_for(feeding, 120)
    last = feeder(queue, epochs=1, seed=1, accept_changes=True)
    await asyncio.wait_for(last.run(), 120)
    assert (await queue.run_state("r")).feed_closed
    await queue.close()
