"""The metrics that an autoscaler reads."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry

from meshrl.contract.types import ROLLOUT_STAGE, Version
from meshrl.rpc.queue_metrics import QueueCollector, wanted_workers
from meshrl.testing.contract.queue_actors import spec, tasks
from meshrl.transferqueue.queue import TransferQueue
from meshrl.transferqueue.stores.memory import MemoryStore

FIRST = Version(1, 0)


@pytest.mark.parametrize(
    ("rows", "slots", "workers", "expected"),
    [
        (0, 64, 2, 0),  # nothing to sample: the trainer is the bottleneck
        (10, 0, 0, 1),  # no worker yet
        (64, 64, 2, 2),
        (65, 64, 2, 3),
        (20, 64, 2, 1),
    ],
)
def test_as_many_workers_are_wanted_as_the_rows_would_fill(
    rows: int, slots: int, workers: int, expected: int
) -> None:
    assert wanted_workers(rows, slots, workers) == expected


async def test_prometheus_sees_depth_headroom_and_the_wanted_workers() -> None:
    store = MemoryStore()
    queue = await TransferQueue.open(store)
    await queue.open_run(spec(group_size=4, batch_groups=5, stages=(ROLLOUT_STAGE,)))
    await queue.acquire("run", "trainer")
    await queue.publish("run", FIRST)
    await queue.admit("run", tasks(3, group_size=4), cursor="c", wait_s=5)
    for worker in ("a", "b"):
        await queue.lease(["run"], "rollout", worker=worker, limit=2, version=FIRST, wait_s=5)
    registry = CollectorRegistry()
    registry.register(QueueCollector(queue, store))

    def gauge(name: str) -> float | None:
        return registry.get_sample_value(f"meshrl_rollout_{name}", {"run": "run"})

    names = ("ready_rows", "held_rows", "slots", "workers", "headroom_rows", "wanted_workers")
    assert [gauge(name) for name in names] == [8, 4, 4, 2, 8, 6]
    await queue.close_feed("run")
    assert gauge("headroom_rows") == 0
    await queue.close()
