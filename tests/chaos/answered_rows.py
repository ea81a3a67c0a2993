"""A queue with rows that have been answered and wait for their reward."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from meshrl.contract.ports import Queue
from meshrl.contract.rows import rollout_write, trajectory
from meshrl.contract.types import (
    ROLLOUT_STAGE,
    Outcome,
    RunSpec,
    Task,
    Trajectory,
    Uid,
    Version,
    VersionSpan,
)

FIRST = Version(1, 0)
GROUP = 4
Answer = Callable[[Uid], str]


async def open_run(queue: Queue, run: str, groups: int, **changes: Any) -> None:
    """A run with `groups` tasks, their ground truth being their number, admitted and leasable."""
    options = {"max_staleness": 0.0, "lease_ttl_s": 5.0, "batch_groups": groups} | changes
    await queue.open_run(RunSpec(run=run, group_size=GROUP, **options))
    await admit_all(queue, run, groups, gated=options.get("gated", True))


async def admit_all(queue: Queue, run: str, groups: int, *, gated: bool = True) -> None:
    """`groups` tasks for an open run, leasable."""
    if gated:
        await queue.acquire(run, "trainer")
        await queue.publish(run, FIRST)
    tasks = [
        Task(
            run=run,
            task_id=f"t{number:03}",
            prompt_ids=np.arange(3, 7, dtype=np.int32),
            data_source="unit",
            ground_truth=str(number),
            extra_info={"index": number},
            group_size=GROUP,
        )
        for number in range(groups)
    ]
    assert await queue.admit(run, tasks, cursor="end", wait_s=5) == groups
    await queue.close_feed(run)


async def answer_all(queue: Queue, run: str, groups: int, answer: Answer) -> None:
    """Play the rollout stage: every row of the run gets the response `answer(uid)`."""
    left = groups * GROUP
    while left:
        lease = await queue.lease(
            [run], ROLLOUT_STAGE.name, worker="w", limit=left, version=FIRST, wait_s=5
        )
        writes = [
            rollout_write(_row(row.uid, answer(row.uid)), Outcome.OK, "stop", FIRST)
            for row in lease.rows
        ]
        tokens = {row.uid: row.token for row in lease.rows}
        await queue.write_rows(run, ROLLOUT_STAGE.name, tokens, writes)
        left -= len(writes)


def _row(uid: Uid, response: str) -> Trajectory:
    return Trajectory(
        uid=uid,
        tokens=np.arange(8, dtype=np.int32),
        loss_mask=np.array([0, 0, 0, 0, 1, 1, 1, 1], dtype=np.uint8),
        rollout_logprobs=np.zeros(8, dtype=np.float32),
        spans=(VersionSpan(version=FIRST, start=4, end=8),),
        response_text=response,
    )


async def scored(queue: Queue, run: str, groups: int) -> Mapping[Uid, Trajectory]:
    """Wait for a batch of all groups; its rows."""
    batch = await queue.take(run, epoch=1, step=0, groups=groups, batch_id="b", wait_s=60)
    uids = [row.uid for row in batch.rows]
    names: Sequence[str] = (
        "tokens",
        "loss_mask",
        "rollout_logprobs",
        "spans",
        "response_text",
        "reward",
        "reward_components",
        "reward_hash",
    )
    columns = await queue.fetch_rows(run, uids, names)
    return {uid: trajectory(uid, each) for uid, each in zip(uids, columns, strict=True)}
