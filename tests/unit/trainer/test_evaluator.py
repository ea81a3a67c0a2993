"""An evaluation goes through a queue that holds only a part of it at once, with several answers to each prompt."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np

from meshrl.contract.rows import reward_write, rollout_write
from meshrl.contract.stage_worker import Failure, Intake, StageResult, StageWorker
from meshrl.contract.types import (
    REWARD_STAGE,
    ROLLOUT_STAGE,
    LeasedRow,
    Outcome,
    RunSpec,
    Score,
    Task,
    Trajectory,
    Version,
    VersionSpan,
)
from meshrl.trainer.loop.evaluation import Evaluator
from meshrl.transferqueue import stores
from meshrl.transferqueue.config import QueueConfig
from meshrl.transferqueue.queue import TransferQueue

VERSION = Version(1, 4)


def spec(room: int, answers: int) -> RunSpec:
    return RunSpec(
        run="r.eval", group_size=answers, batch_groups=1, max_staleness=math.inf, gated=False,
        resident_batches=room, lease_ttl_s=60.0,
    )  # fmt: skip


def tasks(count: int, answers: int) -> list[Task]:
    return [
        Task(run="r.eval", task_id=str(n), prompt_ids=np.array([1], np.int32), group_size=answers)
        for n in range(count)
    ]


async def answer(rows: Sequence[LeasedRow]) -> list[StageResult]:
    return [
        rollout_write(
            Trajectory(
                uid=row.uid,
                tokens=np.array([1, 2], np.int32),
                loss_mask=np.array([0, 1], np.uint8),
                rollout_logprobs=np.zeros(2, np.float32),
                spans=(VersionSpan(version=VERSION, start=1, end=2),),
                response_text="a",
            ),
            Outcome.OK, "stop", VERSION,
        )
        for row in rows
    ]  # fmt: skip


async def judge(rows: Sequence[LeasedRow]) -> list[StageResult]:
    """The first answer to a prompt is right; some prompts have no scorer."""
    return [
        Failure(uid=row.uid, outcome=Outcome.INFRA_FAULT, reason="no scorer", lasting=True)
        if row.task.data_source == "unknown"
        else reward_write(Score(uid=row.uid, outcome=Outcome.OK, score=float(row.uid.index == 0)))
        for row in rows
    ]


@asynccontextmanager
async def mesh(path: Path, run: RunSpec) -> AsyncIterator[TransferQueue]:
    queue = await TransferQueue.open(stores.build(QueueConfig(store="memory"), path))
    await queue.open_run(run)
    stages = []
    for stage, work in ((ROLLOUT_STAGE, answer), (REWARD_STAGE, judge)):
        intake = Intake(limit=8, per_call=8)
        worker = StageWorker(queue, [run.run], stage, work, worker=stage.name, intake=intake)
        worker.lease_wait_s = 1.0
        stages.append(asyncio.create_task(worker.run()))
    try:
        yield queue
    finally:
        for stage in stages:
            stage.cancel()
        await asyncio.gather(*stages, return_exceptions=True)
        await queue.close()


async def test_an_evaluation_larger_than_its_room_goes_through_in_parts(tmp_path: Path) -> None:
    async with mesh(tmp_path, spec(room=3, answers=4)) as queue:
        evaluator = Evaluator(queue, spec(3, 4), tasks(8, 4), owner="t", take_wait_s=0.5)
        await evaluator.open()
        done = await evaluator.evaluate(VERSION)
        assert (done.tasks, done.lost_tasks, done.score) == (8, 0, 0.25)
        ledger = await queue.ledger("r.eval")
        assert (ledger.admitted, ledger.trained) == (32, 32)


async def test_rows_of_a_predecessor_that_fill_the_room_leave_first(tmp_path: Path) -> None:
    async with mesh(tmp_path, spec(room=3, answers=4)) as queue:
        killed = Evaluator(queue, spec(3, 4), tasks(8, 4), owner="t", take_wait_s=0.5)
        await killed.open()
        assert await killed._admit(killed._tasks, 0.0) == 3
        evaluator = Evaluator(queue, spec(3, 4), tasks(2, 4), owner="t", take_wait_s=0.5)
        await evaluator.open()
        done = await evaluator.evaluate(VERSION)
        assert (done.tasks, done.score) == (2, 0.25)


async def test_prompts_that_cannot_be_scored_are_lost_without_a_wait(tmp_path: Path) -> None:
    async with mesh(tmp_path, spec(room=8, answers=2)) as queue:
        held_out = tasks(6, 2)
        for at in (1, 4):
            held_out[at] = dataclasses.replace(held_out[at], data_source="unknown")
        evaluator = Evaluator(queue, spec(8, 2), held_out, owner="t", take_wait_s=3600)
        await evaluator.open()
        async with asyncio.timeout(60):
            done = await evaluator.evaluate(VERSION)
        assert (done.tasks, done.lost_tasks, done.score) == (6, 2, 0.5)
