"""The reward stage at a real queue: scores are written, faults are given back, two runs share one judge."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from meshrl.contract.errors import UserError, WaitTimeoutError
from meshrl.contract.rows import (
    column_text,
    posted_column,
    reward_write,
    rollout_write,
    sample_again,
    trajectory,
)
from meshrl.contract.types import (
    DATA_SOURCE,
    POSTED_REWARD,
    REWARD_COLUMNS,
    REWARD_INPUTS,
    ROLLOUT_STAGE,
    LeasedRow,
    Message,
    Outcome,
    PostedReward,
    RowWrite,
    RunSpec,
    Sample,
    Score,
    Task,
    Trajectory,
    Uid,
    Version,
    VersionSpan,
    reward_stage,
    rollout_stage,
)
from meshrl.rewardd.config import CustomRewardFunctionConfig, RewardConfig
from meshrl.rewardd.judge import build_judge
from meshrl.rewardd.pool.pool import PoolJudge
from meshrl.rewardd.registry.building import open_registry
from meshrl.rewardd.reward_stage import MOST_COMPONENT_NAMES, RewardStage, sample_of
from meshrl.transferqueue.queue import TransferQueue
from meshrl.transferqueue.stores.memory import MemoryStore

from ...waiting import runs, until

SOURCE = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if solution_str == "bad":
        raise RuntimeError("cannot judge this")
    return {"score": len(solution_str), "tokens": extra_info["response_length"]}
"""


@pytest.fixture
async def judge(tmp_path: Path) -> AsyncIterator[PoolJudge]:
    path = tmp_path / "reward.py"
    path.write_text(SOURCE)
    judge = build_judge(RewardConfig(custom_reward_function=CustomRewardFunctionConfig(path=path)))
    yield judge
    await judge.close()


def rollout_of(row: LeasedRow, text: str) -> RowWrite:
    trajectory = Trajectory(
        uid=row.uid,
        tokens=np.arange(5, dtype=np.int32),
        loss_mask=np.array([0, 0, 1, 0, 1], dtype=np.uint8),
        rollout_logprobs=np.zeros(5, dtype=np.float32),
        spans=(VersionSpan(version=Version(1, 0), start=2, end=5),),
        response_text=text,
    )
    return rollout_write(trajectory, Outcome.OK, "stop", Version(1, 0))


async def admit(queue: TransferQueue, run: str, texts: list[str], **spec: object) -> None:
    """Open `run` with one task per text, answered with it."""
    fields = {"group_size": 1, "batch_groups": len(texts), "max_staleness": 0.0, "max_attempts": 2}
    await queue.open_run(RunSpec(run=run, **{**fields, **spec}))  # type: ignore[arg-type]
    tasks = [
        Task(
            run=run,
            task_id=str(n),
            prompt_ids=np.arange(2, dtype=np.int32),
            messages=(Message(role="user", content=f"prompt {n}"),),
            ground_truth="",
        )
        for n in range(len(texts))
    ]
    await queue.admit(run, tasks, cursor="end", wait_s=5)
    version = Version((await queue.acquire(run, "trainer")).epoch, 0)
    await queue.publish(run, version)
    lease = await queue.lease(
        [run],
        "rollout",
        worker="studio",
        limit=len(texts),
        at_least=len(texts),
        version=version,
        wait_s=5,
    )
    rows = [rollout_of(row, texts[int(row.uid.task)]) for row in lease.rows]
    await queue.write_rows(run, "rollout", {row.uid: row.token for row in lease.rows}, rows)


@asynccontextmanager
async def running(stage: RewardStage) -> AsyncIterator[None]:
    task = asyncio.create_task(stage.run(grace_s=5))
    try:
        yield
    finally:
        stage.drain()
        await task


async def test_rows_of_two_runs_get_their_rewards(queue: TransferQueue, judge: PoolJudge) -> None:
    await admit(queue, "run", ["a", "bbb"])
    await admit(queue, "run.eval", ["cc"], gated=False, priority=1)
    stage = RewardStage(queue, ["run", "run.eval"], judge, worker="judge")
    async with running(stage):
        await until(lambda: stage.stats.written == 3)
    columns = ["reward", "reward_components", "reward_hash"]
    wanted = {Uid("run", "0", 0): 1.0, Uid("run", "1", 0): 3.0, Uid("run.eval", "0", 0): 2.0}
    for uid, reward in wanted.items():
        (row,) = await queue.fetch_rows(uid.run, [uid], columns)
        assert float(row["reward"][0]) == reward
        assert json.loads(column_text(row["reward_components"])) == {
            "compute_score": reward,
            "tokens": 3.0,
        }
        assert column_text(row["reward_hash"]) == judge.reward_hash


async def test_a_fault_is_retried_then_dead_lettered_and_never_a_reward(
    queue: TransferQueue, judge: PoolJudge
) -> None:
    await admit(queue, "run", ["bad", "good"], max_staleness=1.0)
    stage = RewardStage(queue, ["run"], judge, worker="judge")
    async with running(stage):
        await until(lambda: stage.stats.failed == 2 and stage.stats.written == 1)
    (letter,) = await queue.dead_letters("run")
    assert letter.uid == Uid("run", "0", 0)
    assert letter.outcome is Outcome.INFRA_FAULT
    assert "RuntimeError: cannot judge this at " in letter.reason
    assert (await queue.ledger("run")).balanced


class Inventive:
    """A judge that has two new component names for each row, beside one that it always gives."""

    reward_hash = "inventive"

    async def start(self) -> None: ...

    async def score(self, samples: Sequence[Sample]) -> list[Score]:
        return [
            Score(
                uid=each.uid,
                outcome=Outcome.OK,
                components={"format": 1.0, f"a{each.uid.task}": 1.0, f"b{each.uid.task}": 0.0},
            )
            for each in samples
        ]


async def test_a_reward_that_never_scores_ends_the_wait_for_a_batch_after_sixteen_rows(
    queue: TransferQueue, judge: PoolJudge
) -> None:
    await admit(queue, "train", ["bad"] * 40, max_attempts=9)
    stage = RewardStage(queue, ["train"], judge, worker="judge")
    async with running(stage):
        with pytest.raises(UserError, match=r"none was finished in between.*cannot judge this"):
            await queue.take("train", epoch=1, step=0, groups=40, batch_id="b", wait_s=60)
    letters = await queue.dead_letters("train")
    assert len(letters) >= 16 and {letter.attempts for letter in letters} == {2}


async def test_component_names_of_a_run_are_bounded_and_the_first_too_many_is_told(
    queue: TransferQueue, caplog: pytest.LogCaptureFixture
) -> None:
    count = MOST_COMPONENT_NAMES
    await admit(queue, "run", ["x"] * count)
    stage = RewardStage(queue, ["run"], Inventive(), worker="judge")
    async with running(stage):
        await until(lambda: stage.stats.written == count)
    rows = await queue.fetch_rows(
        "run", [Uid("run", str(n), 0) for n in range(count)], ["reward_components"]
    )
    kept = [json.loads(column_text(row["reward_components"])) for row in rows]
    assert all("format" in components for components in kept)
    assert len({name for components in kept for name in components}) == MOST_COMPONENT_NAMES
    assert caplog.text.count("more than 256 names") == 1


async def test_a_cancelled_stage_gives_its_rows_back_at_once(
    queue: TransferQueue, tmp_path: Path
) -> None:
    path = tmp_path / "slow.py"
    path.write_text(SOURCE + "    \nimport time\ndef slow(**kwargs):\n    time.sleep(3600)\n")
    custom = CustomRewardFunctionConfig(path=path, name="slow")
    judge = build_judge(RewardConfig(custom_reward_function=custom, deadline_s=3600))
    await judge.start()
    pids = judge.pids
    await admit(queue, "run", ["a", "b"], lease_ttl_s=3600.0)
    stage = RewardStage(queue, ["run"], judge, worker="judge")
    task = asyncio.create_task(stage.run(grace_s=0.1))
    await until(lambda: stage.held == 2)
    stage.drain()
    await task
    await judge.close()
    lease = await queue.lease(["run"], "reward", worker="other", limit=2, at_least=2, wait_s=5)
    assert [row.delivery for row in lease.rows] == [1, 1]
    assert not any(map(runs, pids))
    with pytest.raises(WaitTimeoutError):
        await queue.lease(["run"], "reward", worker="third", limit=1, wait_s=0.01)


def test_a_row_without_a_mask_or_a_sampled_token_has_no_length() -> None:
    task = Task(run="r", task_id="t", prompt_ids=np.zeros(1, dtype=np.int32), extra_info={"a": 1})
    text = np.frombuffer(b"hi", dtype=np.uint8)

    def row(**columns: np.ndarray) -> LeasedRow:
        columns = {"response_text": text, **columns}
        return LeasedRow(uid=Uid("r", "t", 0), token=1, task=task, columns=columns, delivery=1)

    assert sample_of(row()).extra_info == {"a": 1}
    masked = sample_of(row(loss_mask=np.zeros(4, dtype=np.uint8)))
    assert masked.extra_info == {"a": 1, "response_length": 0, "num_turns": 1}
    assert masked.solution == "hi"


@pytest.mark.parametrize(("mask", "length", "turns"), [("0011", 2, 2), ("0011011", 5, 4)])
def test_turns_of_both_sides_are_counted(mask: str, length: int, turns: int) -> None:
    task = Task(run="r", task_id="t", prompt_ids=np.zeros(1, dtype=np.int32))
    columns = {
        "response_text": np.frombuffer(b"hi", dtype=np.uint8),
        "loss_mask": np.array(list(mask), dtype=np.uint8),
    }
    row = LeasedRow(uid=Uid("r", "t", 0), token=1, task=task, columns=columns, delivery=1)
    assert sample_of(row).extra_info == {"response_length": length, "num_turns": turns}


PER_TOKEN = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if solution_str == "plain":
        return 7
    if solution_str == "steps":
        return {"score": 0, "token_rewards": [float(end) for end in extra_info["token_ends"]]}
    return {"score": 6, "token_rewards": [1, 2, 3]}
"""


async def test_every_token_gets_its_reward_and_a_plain_score_stands_at_the_last_sampled_one(
    queue: TransferQueue, tmp_path: Path
) -> None:
    (tmp_path / "reward.py").write_text(PER_TOKEN)
    custom = CustomRewardFunctionConfig(path=tmp_path / "reward.py")
    judge = build_judge(RewardConfig(custom_reward_function=custom))
    stages = (ROLLOUT_STAGE, reward_stage(keep_inputs=True, token_rewards=True))
    await admit(queue, "run", ["tokens", "plain", "steps"], stages=stages)
    stage = RewardStage(
        queue,
        ["run"],
        judge,
        worker="judge",
        keep_inputs=["run"],
        token_rewards=["run"],
        token_ends=lambda tokens: [int(token) * 10 for token in tokens],
    )
    async with running(stage):
        await until(lambda: stage.stats.written == 3)
    await judge.close()
    uids = [Uid("run", str(n), 0) for n in range(3)]
    columns = ["token_rewards", "response_text", "reward_inputs"]
    rows = await queue.fetch_rows("run", uids, columns)
    assert [row["token_rewards"].tolist() for row in rows] == [
        [0, 0, 1, 2, 3],
        [0, 0, 0, 0, 7],
        [0, 0, 20, 30, 40],
    ]
    again = sample_again(uids[2], rows[2])
    assert again.messages == (Message(role="user", content="prompt 2"),)
    assert again.extra_info == {
        "response_length": 3,
        "num_turns": 4,
        "token_ends": [20, 30, 40],
    }


async def test_token_rewards_of_another_length_are_a_fault_of_the_row(
    queue: TransferQueue, tmp_path: Path
) -> None:
    class Short:
        reward_hash = "h"

        async def score(self, samples: Sequence[Sample]) -> Sequence[Score]:
            return [
                Score(uid=s.uid, outcome=Outcome.OK, score=1.0, token_rewards=(1.0,))
                for s in samples
            ]

        async def close(self) -> None:
            pass

    await admit(queue, "run", ["a"], stages=(ROLLOUT_STAGE, reward_stage(token_rewards=True)))
    stage = RewardStage(queue, ["run"], Short(), worker="judge", token_rewards=["run"])
    async with running(stage):
        await until(lambda: stage.stats.failed == 2)
    (letter,) = await queue.dead_letters("run")
    assert letter.reason.endswith("1 token_rewards for a response of 3 tokens")


@pytest.mark.parametrize(
    ("rewards", "line"),
    [
        ([0, 0, 1], r"column token_rewards has 3 entries, the row 5 tokens"),
        ([0, 0, 1, np.nan, 2], r"column token_rewards holds nan at 3, want finite numbers"),
    ],
)
async def test_the_queue_refuses_rewards_that_are_not_one_finite_number_a_token(
    queue: TransferQueue, rewards: list[float], line: str
) -> None:
    await admit(queue, "run", ["a", "b"], stages=(ROLLOUT_STAGE, reward_stage(token_rewards=True)))
    lease = await queue.lease(["run"], "reward", worker="w", limit=2, at_least=2, wait_s=5)
    good, bad = (
        reward_write(
            Score(uid=row.uid, outcome=Outcome.OK, score=1.0), loss_mask=row.columns["loss_mask"]
        )
        for row in lease.rows
    )
    spoiled = {**bad.columns, "token_rewards": np.array(rewards, dtype=np.float32)}
    tokens = {row.uid: row.token for row in lease.rows}
    with pytest.raises(UserError, match=line) as refused:
        await queue.write_rows(
            "run", "reward", tokens, [good, RowWrite(uid=bad.uid, columns=spoiled)]
        )
    assert refused.value.details["uid"] == str(bad.uid)
    await queue.write_rows("run", "reward", tokens, [good, bad])


LENGTH_SOURCE = """
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
    path.write_text(LENGTH_SOURCE)
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
