"""A trainer of two ranks whose fleet takes versions slowly, and which saves after each step.

Rank 0 prints the steps whose checkpoints were committed. A collective that a rank misses fails after seconds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import rank_work

from meshrl.contract.ports import Queue, WeightSource
from meshrl.contract.rows import reward_write, rollout_write
from meshrl.contract.types import Batch, Columns, Outcome, Score, Uid, Version
from meshrl.trainer.checkpoint.checkpoint import TrainerState
from meshrl.trainer.config import TrainerConfig
from meshrl.trainer.loop.context import RunContext, TrainerSettings
from meshrl.trainer.loop.loop import Trainer
from meshrl.trainer.ranks import world as ranks
from meshrl.trainer.ranks.compute import Compute
from meshrl.trainer.ranks.world import World

STEPS = 2
PUBLISH_S = 1.5


class SameBatch:
    """The queue, as far as the loop asks it: each step trains on the same rows."""

    def __init__(self) -> None:
        self.committed: list[int] = []
        self._rows = rank_work.trajectories()

    async def take(self, run: str, *, step: int, **given: object) -> Batch:
        rows = rank_work.batch(self._rows).rows
        return Batch.of_rows(rows, batch_id=str(given["batch_id"]), run=run, step=step)

    async def fetch_rows(
        self, run: str, uids: Sequence[Uid], columns: Sequence[str]
    ) -> Sequence[Columns]:
        by_uid = {row.uid: row for row in self._rows}
        found = []
        for uid in uids:
            row = by_uid[uid]
            score = Score(
                uid=uid,
                outcome=Outcome.OK,
                score=row.reward or 0.0,
                components={},
                reward_hash="h",
            )
            rollout = rollout_write(row, Outcome.OK, "stop", Version(1, 0))
            found.append({**rollout.columns, **reward_write(score).columns})
        return found

    async def settle(self, run: str, **given: object) -> None: ...

    async def commit(self, run: str, *, epoch: int, step: int) -> None:
        self.committed.append(step)


class SlowFleet:
    """Takes each version after many times `take_wait_s`."""

    async def publish(self, source: WeightSource) -> None:
        await asyncio.sleep(PUBLISH_S)

    async def drained(self) -> None: ...


async def train(model: Path, directory: Path) -> None:
    world = World.start("cpu")
    settings = TrainerSettings(
        run="r", directory=directory, owner="test", seed=0, tokenizer=model,
        trainer=TrainerConfig(save_freq=1, take_wait_s=0.1),
        batch_groups=rank_work.GROUPS, group_size=rank_work.GROUP_SIZE, total_steps=STEPS,
    )  # fmt: skip
    state = TrainerState(run="r", step=0, epoch=1, seed=0, world_size=world.size, kl_coef=0.0)
    compute, queue = Compute(world.device), SameBatch()
    context = RunContext(
        settings=settings, queue=cast(Queue, queue), learner=rank_work.make(model, world),
        compute=compute,
    )  # fmt: skip
    await Trainer(context, state, SlowFleet()).run()
    compute.close()
    if world.is_main:
        print(*queue.committed)
    world.close()


def main(model: str, directory: str) -> None:
    ranks.CONTROL_TIMEOUT_S = 20.0  # type: ignore[misc]
    asyncio.run(train(Path(model), Path(directory)))
