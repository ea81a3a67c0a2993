"""Everybody around the queue. Each can be killed at any moment and continues from what is durable."""

from __future__ import annotations

import asyncio
import json
import random
import zlib
from collections.abc import Awaitable, Callable
from itertools import groupby
from typing import Final

import numpy as np

from meshrl.contract.errors import EndOfDataError, FencedError, WaitTimeoutError
from meshrl.contract.ports import Queue
from meshrl.contract.rows import reward_write, text_column
from meshrl.contract.types import (
    Batch,
    Lease,
    LeasedRow,
    Outcome,
    RowFacts,
    RowWrite,
    Score,
    Task,
    Uid,
    Version,
)

from .plan import BATCH, CHECKPOINT_EVERY, GROUP, RUN, STAGES, Plan

ALL_COLUMNS = [name for stage in STAGES for name in stage.writes]
FILTERED_OF = 13
"""One task in so many is filtered by the trainer."""


async def feed(queue: Queue, plan: Plan, moods: random.Random) -> None:
    """Starts where the queue says that it stopped, and repeats itself a little; ends when there is enough.

    Ends between two chunks only, so that the stored cursor counts every task that was ever admitted.
    """
    state = await queue.run_state(RUN)
    if state.feed_closed:
        return
    end = int(state.cursor or 0)
    at = max(0, end - 2)
    while not (plan.enough.exists() and at >= end):
        end = max(end, at + moods.randint(1, 4))
        while at < end:
            chunk = [_task(number) for number in range(at, end)]
            try:
                at += await queue.admit(RUN, chunk, cursor=str(end), wait_s=1.0)
            except WaitTimeoutError:
                continue
    await queue.close_feed(RUN)


def _task(number: int) -> Task:
    prompt = np.array([number], dtype=np.int32)
    return Task(run=RUN, task_id=f"t{number:06}", prompt_ids=prompt, group_size=GROUP)


async def produce(queue: Queue, name: str, moods: random.Random) -> None:
    """A rollout worker."""
    await _work(queue, "rollout", name, moods)


async def annotate(queue: Queue, name: str, moods: random.Random) -> None:
    """Reward and reference log-probs, at the same time."""
    async with asyncio.TaskGroup() as tasks:
        for stage in ("reward", "reference"):
            tasks.create_task(_work(queue, stage, f"{name}-{stage}", moods))


async def _work(queue: Queue, stage: str, worker: str, moods: random.Random) -> None:
    while True:
        version = (await queue.run_state(RUN)).published
        try:
            lease = await queue.lease(
                [RUN],
                stage,
                worker=worker,
                limit=moods.randint(1, 4 * GROUP),
                version=version if stage == "rollout" else None,
                wait_s=2.0,
            )
        except WaitTimeoutError:
            continue
        except EndOfDataError:
            return
        try:
            await _answer(queue, lease, version, moods)
        except FencedError:
            continue


async def _answer(queue: Queue, lease: Lease, version: Version, moods: random.Random) -> None:
    """Mostly written, sometimes in two parts or twice; now and then given back, or failed."""
    rows = list(lease.rows)
    mood = moods.random()
    if mood < 0.03:
        await queue.release(RUN, lease.stage, {row.uid: row.token for row in rows})
        return
    if mood < 0.06:
        row = rows.pop()
        await queue.fail(RUN, lease.stage, row.uid, row.token, Outcome.INFRA_FAULT, "moody")
    elif mood < 0.10:
        await queue.renew(RUN, lease.stage, lease.worker, [row.uid for row in rows])
    middle = moods.randint(0, len(rows)) if mood < 0.4 else len(rows)
    for part in (rows[:middle], rows[middle:]):
        writes = [_made(lease.stage, row, version) for row in part]
        for _ in range(2 if mood > 0.9 else 1):
            if writes:
                await queue.write_rows(
                    RUN, lease.stage, {row.uid: row.token for row in part}, writes
                )


LONGEST: Final = 22_000 / 4
"""The longest row, of 200 kB, by the shortest, of 4 tokens: each length between is as likely as twice that."""


def _made(stage: str, row: LeasedRow, version: Version) -> RowWrite:
    """Payload that depends on uid and fencing token, so that two writers' payloads differ."""
    dice = np.random.default_rng([zlib.crc32(str(row.uid).encode()), row.token])
    if stage == "reward":
        score = float(np.float32(dice.normal()))
        return reward_write(Score(uid=row.uid, outcome=Outcome.OK, score=score))
    if stage == "reference":
        length = len(row.columns["tokens"])
        return RowWrite(uid=row.uid, columns={"ref_logprobs": _floats(dice, length)})
    length = int(4 * LONGEST ** dice.random())
    columns = {
        "tokens": dice.integers(0, 50_000, length, dtype=np.int32),
        "loss_mask": np.ones(length, np.uint8),
        "rollout_logprobs": _floats(dice, length),
        "spans": np.array([[version.epoch, version.step, 0, length]], dtype=np.int64),
        "response_text": text_column(f"{row.uid} under {row.token}"),
        "replica": text_column("campaign"),
    }
    facts = RowFacts(outcome=Outcome.OK, num_tokens=length, oldest=version, newest=version)
    return RowWrite(uid=row.uid, columns=columns, facts=facts)


def _floats(dice: np.random.Generator, length: int) -> np.ndarray:
    return dice.normal(size=length).astype(np.float32)


async def consume(queue: Queue, plan: Plan, moods: random.Random) -> None:
    """A trainer, resumed at its checkpoint. Its model is the list of the rows that it learned."""
    step = resume(plan)
    epoch = (await queue.acquire(RUN, "consumer")).epoch
    await queue.commit(RUN, epoch=epoch, step=step)
    await queue.rewind(RUN, epoch=epoch, step=step)
    await queue.publish(RUN, Version(epoch, step))
    while True:
        try:
            batch = await _take(queue, epoch, step, moods)
        except WaitTimeoutError:
            continue
        except EndOfDataError:
            break
        await queue.fetch_rows(RUN, [row.uid for row in batch.rows], ALL_COLUMNS)
        remaining = await _filter(queue, epoch, batch)
        with plan.lineage.open("a") as lineage:
            lineage.write(
                json.dumps({"step": step, "rows": [str(uid) for uid in remaining]}) + "\n"
            )
        await queue.settle(RUN, epoch=epoch, step=step, batch_id=batch.batch_id)
        step += 1
        await queue.publish(RUN, Version(epoch, step))
        if step % CHECKPOINT_EVERY == 0:
            await _save(queue, plan, epoch, step)
    await _save(queue, plan, epoch, step)


def resume(plan: Plan) -> int:
    """The checkpoint's step; what was learned after it is forgotten."""
    if not plan.checkpoint.exists():
        plan.lineage.write_text("")
        return 0
    saved = json.loads(plan.checkpoint.read_text())
    with plan.lineage.open("r+") as lineage:
        lineage.truncate(saved["bytes"])
    return int(saved["step"])


async def _take(queue: Queue, epoch: int, step: int, moods: random.Random) -> Batch:
    for _ in range(2 if moods.random() < 0.2 else 1):
        batch = await queue.take(
            RUN, epoch=epoch, step=step, groups=BATCH, batch_id=f"{epoch}-{step}", wait_s=20.0
        )
    return batch


async def _filter(queue: Queue, epoch: int, batch: Batch) -> list[Uid]:
    """The rows that are learned: a task is filtered whenever it comes, or never."""
    remaining: list[Uid] = []
    for task, rows in groupby(batch.rows, key=lambda row: row.group):
        uids = [row.uid for row in rows]
        if zlib.crc32(task.encode()) % FILTERED_OF:
            remaining += uids
        else:
            await queue.filter(RUN, epoch=epoch, uids=uids, reason="unlucky")
    return remaining


async def _save(queue: Queue, plan: Plan, epoch: int, step: int) -> None:
    half = plan.checkpoint.with_suffix(".half")
    half.write_text(json.dumps({"step": step, "bytes": plan.lineage.stat().st_size}))
    half.replace(plan.checkpoint)
    await queue.commit(RUN, epoch=epoch, step=step)
    await queue.ledger(RUN)


def actor(name: str, plan: Plan, moods: random.Random) -> Callable[[Queue], Awaitable[None]]:
    """The work of the process of that name, as a function of a queue."""

    async def act(queue: Queue) -> None:
        await queue.open_run(plan.spec)
        match name.partition("-")[0]:
            case "feeder":
                await feed(queue, plan, moods)
            case "producer":
                await produce(queue, name, moods)
            case "annotator":
                await annotate(queue, name, moods)
            case "consumer":
                await consume(queue, plan, moods)

    return act
