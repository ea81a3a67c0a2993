"""The clients of a queue, for tests: a feeder, workers of each stage and a trainer, each a few lines."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from meshrl.contract.ports import Queue
from meshrl.contract.rows import reward_write, rollout_write
from meshrl.contract.types import (
    REFERENCE_STAGE,
    REWARD_STAGE,
    ROLLOUT_STAGE,
    Batch,
    Lease,
    LeasedRow,
    Ledger,
    Outcome,
    RowFacts,
    RowWrite,
    RunSpec,
    SamplingParams,
    Score,
    Task,
    Trajectory,
    Uid,
    Version,
    VersionSpan,
    Waiting,
)

WAIT_S = 20.0
"""Seconds; a wait in a test that passes never lasts so long."""


def spec(run: str = "run", **changes: Any) -> RunSpec:
    """Two groups of two make a batch; on-policy."""
    fields: dict[str, Any] = {"group_size": 2, "batch_groups": 2, "max_staleness": 0.0}
    return RunSpec(run=run, **{**fields, **changes})


def task(name: str, run: str = "run", **changes: Any) -> Task:
    fields: dict[str, Any] = {
        "prompt_ids": np.arange(3, dtype=np.int32),
        "group_size": 2,
        "data_source": "sums",
        "ground_truth": {"answer": 4},
        "extra_info": {"index": 1, "text": "naïve ☃"},
        "sampling": SamplingParams(temperature=0.5, stop=("\n",), stop_token_ids=(2,)),
    }
    return Task(run=run, task_id=name, **{**fields, **changes})


def tasks(count: int, start: int = 0, **changes: Any) -> list[Task]:
    return [task(f"t{number}", **changes) for number in range(start, start + count)]


def rollout_of(row: LeasedRow, version: Version, tokens: int = 6) -> RowWrite:
    """An answer whose payload differs from every other row's."""
    mark = np.float32(row.uid.index + 100 * row.uid.attempt)
    trajectory = Trajectory(
        uid=row.uid,
        tokens=np.arange(tokens, dtype=np.int32),
        loss_mask=np.array([0] * 3 + [1] * (tokens - 3), dtype=np.uint8),
        rollout_logprobs=np.full(tokens, -mark, dtype=np.float32),
        spans=(VersionSpan(version=version, start=3, end=tokens),),
        response_text=f"answer to {row.uid}",
    )
    return rollout_write(trajectory, Outcome.OK, "stop", version)


def reference_of(row: LeasedRow) -> RowWrite:
    return RowWrite(
        uid=row.uid,
        columns={"ref_logprobs": np.zeros(len(row.columns["tokens"]), dtype=np.float32)},
    )


def tokens_of(lease: Lease) -> dict[Uid, int]:
    return {row.uid: row.token for row in lease.rows}


def uids(lease: Lease) -> list[str]:
    return [f"{row.uid.task}.{row.uid.index}.{row.uid.attempt}" for row in lease.rows]


def batch_uids(batch: Batch) -> list[str]:
    return [f"{row.uid.task}.{row.uid.index}.{row.uid.attempt}" for row in batch.rows]


async def waiting_entries(queue: Queue, wait: Callable[[Waiting], bool]) -> Sequence[Waiting]:
    """The entries of `why_waiting`, once one of them is `wait`: until then that call has not arrived."""
    async with asyncio.timeout(WAIT_S):
        while True:
            await asyncio.sleep(0)
            reasons = await queue.why_waiting("run")
            if any(map(wait, reasons)):
                return reasons


def facts(version: Version, tokens: int, outcome: Outcome = Outcome.OK) -> RowFacts:
    return RowFacts(outcome=outcome, num_tokens=tokens, oldest=version, newest=version)


@dataclass
class Actors:
    """All clients of one run."""

    queue: Queue
    run: str = "run"
    epoch: int = 1
    version: Version = field(default=Version(1, 0))

    async def start(self, changes: RunSpec | None = None) -> None:
        """Open the run, acquire it, publish the initial weights."""
        await self.queue.open_run(changes or spec(self.run))
        self.epoch = (await self.queue.acquire(self.run, "trainer")).epoch
        await self.publish(0)

    async def publish(self, step: int) -> None:
        self.version = Version(self.epoch, step)
        await self.queue.publish(self.run, self.version)

    async def feed(self, new_tasks: Sequence[Task], cursor: str = "", wait_s: float = 0.0) -> int:
        return await self.queue.admit(self.run, new_tasks, cursor=cursor, wait_s=wait_s)

    async def lease(
        self, stage: str = "rollout", limit: int = 100, worker: str = "w", wait_s: float = 0.0
    ) -> Lease:
        version = self.version if stage == "rollout" else None
        return await self.queue.lease(
            [self.run], stage, worker=worker, limit=limit, version=version, wait_s=wait_s
        )

    async def write(
        self,
        lease: Lease,
        version: Version | None = None,
        rows: Sequence[LeasedRow] | None = None,
    ) -> None:
        """Answer every row of the lease (or those of `rows`) as its stage would."""
        written: list[RowWrite] = []
        for row in lease.rows if rows is None else rows:
            if lease.stage == ROLLOUT_STAGE.name:
                written.append(rollout_of(row, version or self.version))
            elif lease.stage == REWARD_STAGE.name:
                score = Score(
                    uid=row.uid,
                    outcome=Outcome.OK,
                    score=1.0,
                    components={"correct": 1.0},
                    reward_hash="abc",
                )
                written.append(reward_write(score))
            elif lease.stage == REFERENCE_STAGE.name:
                written.append(reference_of(row))
        await self.queue.write_rows(self.run, lease.stage, tokens_of(lease), written)

    async def work(self, limit: int = 100, version: Version | None = None) -> None:
        """Sample and score the rows that are ready."""
        await self.write(await self.lease("rollout", limit), version)
        await self.write(await self.lease("reward", limit))

    async def take(self, step: int, groups: int = 2, wait_s: float = 0.0, name: str = "") -> Batch:
        return await self.queue.take(
            self.run,
            epoch=self.epoch,
            step=step,
            groups=groups,
            batch_id=name or f"b{step}",
            wait_s=wait_s,
        )

    async def settle(self, step: int, name: str = "") -> None:
        await self.queue.settle(self.run, epoch=self.epoch, step=step, batch_id=name or f"b{step}")

    async def commit(self, step: int) -> None:
        await self.queue.commit(self.run, epoch=self.epoch, step=step)

    async def train(self, step: int) -> Batch:
        """Take, settle and publish one step."""
        batch = await self.take(step)
        await self.settle(step)
        await self.publish(step + 1)
        return batch

    async def ledger(self) -> Ledger:
        """The ledger, which always balances."""
        ledger = await self.queue.ledger(self.run)
        assert ledger.balanced, ledger
        return ledger

    async def resident(self) -> dict[str, int]:
        """Resident rows by state, without the zeros."""
        ledger = await self.ledger()
        return {state: count for state, count in ledger.resident.items() if count}
