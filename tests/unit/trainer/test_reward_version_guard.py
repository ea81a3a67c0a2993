"""Batches of one reward version, at a real queue: switches at boundaries, mixtures made one, faults, restarts."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence

import numpy as np
import pytest

from meshrl.contract.errors import UnavailableError, UserError, WaitTimeoutError
from meshrl.contract.rows import column_text, rollout_write
from meshrl.contract.types import (
    ROLLOUT_STAGE,
    Batch,
    Outcome,
    RunSpec,
    Sample,
    Score,
    Task,
    Trajectory,
    Uid,
    Version,
    VersionSpan,
    reward_stage,
)
from meshrl.rewardd.reward_stage import RewardStage
from meshrl.trainer.loop.reward_guard import RewardVersionGuard
from meshrl.transferqueue.queue import TransferQueue
from meshrl.transferqueue.stores.memory import MemoryStore

from ...waiting import until

GROUPS, SIZE = 4, 2


class Lengths:
    """A first-class stub of the reward service: version `vN` scores N per character; `bad` rows are faults."""

    def __init__(self) -> None:
        self.reward_hash = "v1"
        self.asked = 0
        self.scored: list[str] = []
        self.bad: set[str] = set()
        self.gate = asyncio.Event()
        self.gate.set()

    async def current(self) -> str:
        self.asked += 1
        return self.reward_hash

    async def score(self, samples: Sequence[Sample], *, reward_hash: str = "") -> list[Score]:
        await self.gate.wait()
        version = reward_hash or self.reward_hash
        self.scored += [s.solution for s in samples]
        return [
            Score(uid=s.uid, outcome=Outcome.INFRA_FAULT, reason="cannot")
            if s.solution in self.bad
            else Score(
                uid=s.uid,
                outcome=Outcome.OK,
                score=float(int(version[1:]) * len(s.solution) + len(s.ground_truth)),
                components={"length": float(len(s.solution))},
                reward_hash=version,
            )
            for s in samples
        ]

    async def close(self) -> None:
        self.gate.set()


class Run:
    """A run with everything but a trainer."""

    def __init__(self, queue: TransferQueue, versions: Lengths) -> None:
        self.queue = queue
        self.versions = versions
        self.epoch = 0
        self.rewards = RewardVersionGuard(queue, versions)
        self._task = 0

    async def open(self) -> None:
        stages = (ROLLOUT_STAGE, reward_stage(keep_inputs=True))
        spec = RunSpec(
            run="run",
            group_size=SIZE,
            batch_groups=GROUPS,
            max_staleness=float("inf"),
            stages=stages,
        )
        await self.queue.open_run(spec)
        self.epoch = (await self.queue.acquire("run", "trainer")).epoch
        await self.queue.publish("run", Version(self.epoch, 0))

    async def scored(self, groups: int) -> None:
        """Admit `groups` tasks, answer them, and have them scored by the version of the moment."""
        tasks = [
            Task(
                run="run",
                task_id=f"{self._task + n:03}",
                prompt_ids=np.arange(2, dtype=np.int32),
                ground_truth="gt",
                group_size=SIZE,
            )
            for n in range(groups)
        ]
        self._task += groups
        await self.queue.admit("run", tasks, cursor="x", wait_s=5)
        version = Version(self.epoch, 0)
        rows = groups * SIZE
        lease = await self.queue.lease(
            ["run"], "rollout", worker="w", limit=rows, at_least=rows, version=version, wait_s=5
        )
        writes = [
            rollout_write(
                Trajectory(
                    uid=row.uid,
                    tokens=np.arange(4, dtype=np.int32),
                    loss_mask=np.array([0, 0, 1, 1], dtype=np.uint8),
                    rollout_logprobs=np.zeros(4, dtype=np.float32),
                    spans=(VersionSpan(version=version, start=2, end=4),),
                    response_text=f"{row.uid.task}-{row.uid.index}",
                ),
                Outcome.OK,
                "stop",
                version,
            )
            for row in lease.rows
        ]
        await self.queue.write_rows("run", "rollout", {r.uid: r.token for r in lease.rows}, writes)
        stage = RewardStage(self.queue, ["run"], self.versions, worker="judge", keep_inputs=["run"])
        working = asyncio.create_task(stage.run(grace_s=5))
        await until(lambda: stage.stats.written >= rows)
        stage.drain()
        await working
        self.versions.scored.clear()

    async def mixed(self) -> None:
        """Rows of a batch, one group of v1 and three of v2."""
        await self.scored(1)
        self.versions.reward_hash = "v2"
        await self.scored(3)

    async def take(
        self, step: int, groups: int = GROUPS, part: str = "", wait_s: float = 10
    ) -> Batch:
        return await self.rewards.take(
            "run",
            epoch=self.epoch,
            step=step,
            groups=groups,
            batch_id=f"run/{step}{part}",
            wait_s=wait_s,
        )

    async def seen(
        self, batch: Batch, rewards: RewardVersionGuard | None = None
    ) -> set[tuple[str, float]]:
        """(hash, reward) of the rows as the trainer reads them."""
        uids = [row.uid for row in batch.rows]
        guard = rewards or self.rewards
        rows = await guard.fetch_rows("run", uids, ["reward", "reward_hash", "reward_components"])
        assert all(json.loads(column_text(r["reward_components"])) == {"length": 5.0} for r in rows)
        return {(column_text(r["reward_hash"]), float(r["reward"][0])) for r in rows}


@pytest.fixture
async def run() -> AsyncIterator[Run]:
    queue = await TransferQueue.open(MemoryStore())
    made = Run(queue, Lengths())
    await made.open()
    yield made
    await made.rewards.close()
    await queue.close()


async def test_the_same_version_again_costs_no_question(run: Run) -> None:
    for step in range(3):
        await run.scored(GROUPS)
        batch = await run.take(step)
        assert await run.seen(batch) == {("v1", 7.0)}
    assert run.versions.asked == 1  # at the start: what scored before is not known
    assert run.versions.scored == []


async def test_a_mixed_batch_becomes_one_of_the_version_of_now(run: Run) -> None:
    await run.mixed()
    batch = await run.take(0)
    assert await run.seen(batch) == {("v2", 12.0)}
    assert run.versions.scored == ["000-0", "000-1"]
    assert run.rewards.metrics == {"reward/hash": "v2", "reward/rescored_rows": 2}


async def test_a_version_that_was_superseded_does_not_come_back(run: Run) -> None:
    """Rows of v1 still stand in the queue when a batch has been trained under v2: they are made v2."""
    await run.scored(GROUPS)
    assert await run.seen(await run.take(0)) == {("v1", 7.0)}
    await run.scored(2 * GROUPS - 1)
    run.versions.reward_hash = "v2"
    await run.scored(1)
    hashes = []
    for step, groups in ((1, 3), (2, 5)):
        hashes.append({h for h, _ in await run.seen(await run.take(step, groups))})
    assert hashes == [{"v1"}, {"v2"}]  # all v1 is still one version; the mixture moves on
    run.versions.reward_hash = "v3"
    await run.scored(GROUPS - 1)
    run.versions.reward_hash = "v1"  # rolled back: v1 is now the version of now
    await run.scored(1)
    assert {h for h, _ in await run.seen(await run.take(3))} == {"v1"}


async def test_all_takes_of_a_step_share_a_version_whatever_is_submitted_between(run: Run) -> None:
    await run.scored(2)
    first = await run.take(0, 2)
    run.versions.reward_hash = "v2"
    await run.scored(2)
    second = await run.take(0, 2, part=".1")
    assert await run.seen(first) | await run.seen(second) == {("v1", 7.0)}
    await run.scored(GROUPS)
    assert await run.seen(await run.take(1)) == {("v2", 12.0)}


async def test_a_row_that_cannot_be_scored_again_leaves_with_its_group(run: Run) -> None:
    await run.scored(2)
    run.versions.reward_hash = "v2"
    await run.scored(2)
    run.versions.bad = {"001-1"}
    batch = await run.take(0)
    assert sorted({row.group for row in batch.rows}) == ["000", "002", "003"]
    assert await run.seen(batch) == {("v2", 12.0)}
    assert run.versions.scored.count("001-1") == 3
    ledger = await run.queue.ledger("run")
    assert ledger.filtered == {"not scored again": SIZE}
    assert ledger.balanced


async def test_other_ranks_read_the_same_scores_per_token_where_the_run_has_those(run: Run) -> None:
    run.rewards = RewardVersionGuard(run.queue, run.versions, token_rewards=True)
    await run.mixed()
    batch = await run.take(0)
    other = RewardVersionGuard(run.queue, None, token_rewards=True)
    other.load_json(json.loads(json.dumps(run.rewards.to_json())))
    for rewards in (run.rewards, other):
        scores = rewards.to_json()
        assert [scores[f"run/000/{index}.0"]["token_rewards"] for index in range(SIZE)] == [
            [0, 0, 0, 12.0]
        ] * SIZE
    assert await run.seen(batch, other) == await run.seen(batch) == {("v2", 12.0)}


async def test_a_wait_for_scores_ends_in_time_and_is_joined_by_the_next(run: Run) -> None:
    await run.mixed()
    run.versions.gate.clear()
    with pytest.raises(WaitTimeoutError, match="scored with version v2"):
        await run.take(0, wait_s=0.05)
    run.versions.gate.set()
    assert await run.seen(await run.take(0)) == {("v2", 12.0)}
    assert run.versions.scored == ["000-0", "000-1"]


async def test_a_reward_service_that_is_away_fails_the_take_and_not_the_next_one(run: Run) -> None:
    class Away(Lengths):
        async def current(self) -> str:
            raise UnavailableError("away")

    await run.mixed()
    rewards, away = run.rewards, Away()
    rewards._versions = away  # the client of a service that is restarting
    with pytest.raises(UnavailableError, match="away"):
        await run.take(0)
    rewards._versions = run.versions
    assert await run.seen(await run.take(0)) == {("v2", 12.0)}


async def test_a_trainer_that_dies_takes_the_batch_again_and_decides_anew(run: Run) -> None:
    await run.mixed()
    before = {row.uid for row in (await run.take(0)).rows}
    run.versions.reward_hash = "v3"
    run.rewards = RewardVersionGuard(run.queue, run.versions)
    run.epoch = (await run.queue.acquire("run", "another")).epoch
    again = await run.take(0)
    assert {row.uid for row in again.rows} == before
    assert await run.seen(again) == {("v3", 17.0)}


async def test_without_a_reward_service_a_mixture_is_refused_in_one_line(run: Run) -> None:
    run.rewards = RewardVersionGuard(run.queue, None)
    await run.scored(GROUPS)
    assert await run.seen(await run.take(0)) == {("v1", 7.0)}
    await run.mixed()
    with pytest.raises(UserError, match=r"2 reward versions.*--reward HOST:PORT"):
        await run.take(1)


async def test_without_a_reward_service_a_refill_of_another_version_is_refused_in_one_line(
    run: Run,
) -> None:
    run.rewards = RewardVersionGuard(run.queue, None)
    await run.scored(2)
    await run.take(0, 2)
    run.versions.reward_hash = "v2"
    await run.scored(2)
    with pytest.raises(UserError, match=r"another reward version than v1.*--reward HOST:PORT"):
        await run.take(0, 2, part=".1")


def test_a_uid_survives_the_transfer_to_other_ranks() -> None:
    uid = Uid("r", "a/b", 3, 2)
    assert Uid.parse(str(uid)) == uid
