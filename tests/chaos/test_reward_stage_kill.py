"""kill -9 of scoring processes, at work and idle, and of the service that owns them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from pathlib import Path

from meshrl.contract.stage_worker import Intake
from meshrl.contract.types import Outcome, Sample, Uid
from meshrl.rewardd.config import CustomRewardFunctionConfig, RewardConfig
from meshrl.rewardd.judge import build_judge
from meshrl.rewardd.reward_stage import RewardStage
from meshrl.transferqueue.queue import TransferQueue
from meshrl.transferqueue.stores.memory import MemoryStore

from ..processes import python
from ..waiting import gone, runs
from .answered_rows import GROUP, answer_all, open_run, scored

SLOW = """
import time

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    time.sleep(0.01)
    return float(solution_str)
"""
SERVICE = """
import asyncio, sys
from meshrl.contract.types import Sample, Uid
from meshrl.rewardd.config import RewardConfig
from meshrl.rewardd.judge import build_judge

async def main():
    custom = {"path": sys.argv[1], "name": "stuck"}
    judge = build_judge(RewardConfig(custom_reward_function=custom, deadline_s=3600, workers=2))
    await judge.start()
    sample = dict(data_source="", solution="", ground_truth=None, extra_info={})
    print(*judge.pids, flush=True)
    await judge.score([Sample(uid=Uid("r", str(n), 0), **sample) for n in range(2)])

asyncio.run(main())
"""
GROUPS = 40
KILLS = 6
ATTEMPTS = KILLS + 1
"""A row whose process is killed twice is a fault of that delivery; more deliveries than kills are always enough."""


def config(path: Path) -> RewardConfig:
    path.write_text(SLOW)
    return RewardConfig(custom_reward_function=CustomRewardFunctionConfig(path=path), workers=2)


async def test_every_row_gets_its_own_reward_while_scoring_processes_are_killed(
    tmp_path: Path,
) -> None:
    seed = random.randrange(1 << 30)
    draw = random.Random(seed)
    queue = await TransferQueue.open(MemoryStore())
    judge = build_judge(config(tmp_path / "reward.py"))
    await judge.start()
    stage = RewardStage(
        queue, ["train"], judge, worker="reward-0", intake=Intake(limit=64, per_call=16)
    )
    working = asyncio.create_task(stage.run(grace_s=5))
    killed: set[int] = set()
    try:
        await open_run(queue, "train", GROUPS, max_attempts=ATTEMPTS)
        await answer_all(queue, "train", GROUPS, lambda uid: f"{uid.index}.5")
        taking = asyncio.create_task(scored(queue, "train", GROUPS))
        while len(killed) < KILLS and not taking.done():
            await asyncio.sleep(draw.uniform(0.02, 0.3))
            victim = draw.choice(judge.pids)
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim, signal.SIGKILL)
                killed.add(victim)
        rows = await taking
    finally:
        stage.drain()
        await working
        await judge.close()
    ledger = await queue.ledger("train")
    await queue.close()
    assert killed, f"seed {seed}"
    assert len(rows) == GROUPS * GROUP, f"seed {seed}"
    assert all(row.reward == uid.index + 0.5 for uid, row in rows.items()), f"seed {seed}"
    assert ledger.balanced and not ledger.dead_lettered, f"seed {seed}: {ledger}"


async def test_processes_that_are_killed_while_idle_are_replaced(tmp_path: Path) -> None:
    judge = build_judge(config(tmp_path / "reward.py"))
    try:
        await judge.start()
        before = set(judge.pids)
        for pid in before:
            os.kill(pid, signal.SIGKILL)
        samples = [
            Sample(
                uid=Uid("r", str(n), 0),
                data_source="",
                solution=str(n),
                ground_truth="",
                extra_info={},
            )
            for n in range(20)
        ]
        scores = await judge.score(samples)
        assert [score.outcome for score in scores] == [Outcome.OK] * 20
        assert [score.score for score in scores] == [float(n) for n in range(20)]
        assert not before & set(judge.pids)
    finally:
        await judge.close()


async def test_scoring_processes_end_with_a_killed_service(tmp_path: Path) -> None:
    path = tmp_path / "reward.py"
    path.write_text("def stuck(**kwargs):\n    while True:\n        pass\n")
    async with python("-c", SERVICE, path, stdout=asyncio.subprocess.PIPE) as service:
        assert service.stdout is not None
        pids = [int(pid) for pid in (await service.stdout.readline()).split()]
        assert len(pids) == 2 and all(map(runs, pids))
        service.kill()
        await gone(*pids)
