"""A posted reward is its row's reward, also when rows are scored again; a judge scores the other rows."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np

from meshrl.contract.rows import posted_column, rollout_write, sample_again, trajectory
from meshrl.contract.types import (
    DATA_SOURCE,
    POSTED_REWARD,
    REWARD_COLUMNS,
    REWARD_INPUTS,
    Outcome,
    PostedReward,
    RunSpec,
    Task,
    Trajectory,
    Uid,
    Version,
    VersionSpan,
    reward_stage,
    rollout_stage,
)
from meshrl.rewardd.config import RewardConfig
from meshrl.rewardd.registry.building import open_registry
from meshrl.rewardd.reward_stage import RewardStage
from meshrl.transferqueue.queue import TransferQueue
from meshrl.transferqueue.stores.memory import MemoryStore

SOURCE = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": len(solution_str), "judged": 1}
"""
POSTED = [PostedReward(score=-2.5, components={"steps": 3.0}), None, PostedReward(score=1.0), None]


def row_of(uid: Uid) -> Trajectory:
    return Trajectory(
        uid=uid,
        tokens=np.arange(5, dtype=np.int32),
        loss_mask=np.array([0, 0, 1, 1, 1], dtype=np.uint8),
        rollout_logprobs=np.zeros(5, dtype=np.float32),
        spans=(VersionSpan(version=Version(1, 0), start=2, end=5),),
        response_text="four",
    )


async def test_a_posted_reward_replaces_the_judge_s(tmp_path: Path) -> None:
    path = tmp_path / "reward.py"
    path.write_text(SOURCE)
    config = RewardConfig.model_validate({"custom_reward_function": {"path": path}})
    queue = await TransferQueue.open(MemoryStore())
    stages = (rollout_stage(posted=True), reward_stage(posted=True, keep_inputs=True))
    spec = RunSpec(run="r", group_size=4, batch_groups=1, max_staleness=0.0, stages=stages)
    await queue.open_run(spec)
    await queue.acquire("r", "trainer")
    await queue.publish("r", Version(1, 0))
    # A data set cannot post: only the column counts.
    task = Task(
        run="r",
        task_id="t",
        prompt_ids=np.array([1], dtype=np.int32),
        group_size=4,
        data_source="sums",
        extra_info={"posted_reward": {"score": 99, "components": {}}},
    )
    await queue.admit("r", [task], cursor="", wait_s=5)
    lease = await queue.lease(
        ["r"], "rollout", worker="w", limit=4, version=Version(1, 0), wait_s=5
    )
    writes = []
    for row in lease.rows:
        write = rollout_write(row_of(row.uid), Outcome.OK, "stop", Version(1, 0))
        column = {POSTED_REWARD: posted_column(POSTED[row.uid.index])}
        writes.append(
            type(write)(uid=row.uid, columns={**write.columns, **column}, facts=write.facts)
        )
    await queue.write_rows("r", "rollout", {row.uid: row.token for row in lease.rows}, writes)
    async with open_registry(config, tmp_path / "rewards") as registry:
        stage = RewardStage(queue, ["r"], registry.judge, worker="j", keep_inputs=("r",))
        running = asyncio.create_task(stage.run())
        batch = await queue.take("r", epoch=1, step=0, groups=1, batch_id="b", wait_s=60)
        stage.drain()
        await running
        uids = [row.uid for row in batch.rows]
        columns = await queue.fetch_rows(
            "r",
            uids,
            ("tokens", "loss_mask", "rollout_logprobs", "spans", *REWARD_COLUMNS, DATA_SOURCE),
        )
        found = [trajectory(uid, each) for uid, each in zip(uids, columns, strict=True)]
        assert [row.reward for row in found] == [-2.5, 4.0, 1.0, 4.0]
        assert {row.data_source for row in found} == {"sums"}
        assert found[0].reward_components == {"steps": 3.0}
        assert "judged" in found[1].reward_components
        # One hash for all of them: posted rewards make no mixed batch.
        assert {row.reward_hash for row in found} == {registry.judge.reward_hash}
        inputs = await queue.fetch_rows("r", uids, ("response_text", REWARD_INPUTS))
        samples = [sample_again(uid, each) for uid, each in zip(uids, inputs, strict=True)]
        again = await registry.judge.score_with(registry.judge.reward_hash, samples)
        assert [score.score for score in again] == [-2.5, 4.0, 1.0, 4.0]
    await queue.close()
