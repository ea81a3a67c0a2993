"""kill -9 of scoring processes, and of the service that owns them, while they score."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from meshrl.contract.types import Outcome, Sample, Uid
from meshrl.rewardd.config import CustomRewardFunctionConfig, RewardConfig
from meshrl.rewardd.judge import build_judge

from ..waiting import until

SOURCE = """
import time

def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    time.sleep(0.002)
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


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


async def test_killing_scoring_processes_at_random_loses_no_score(tmp_path: Path) -> None:
    path = tmp_path / "reward.py"
    path.write_text(SOURCE)
    custom = CustomRewardFunctionConfig(path=path)
    judge = build_judge(RewardConfig(custom_reward_function=custom, workers=2, deadline_s=60))
    await judge.start()
    samples = [
        Sample(
            uid=Uid("run", str(n), 0),
            data_source="",
            solution=str(n),
            ground_truth=None,
            extra_info={},
        )
        for n in range(600)
    ]
    scoring = asyncio.create_task(judge.score(samples))  # type: ignore[arg-type]
    draw, killed = random.Random(7), 0
    for _ in range(3):
        # One at a time, and the next only when a new process has taken its place: a sample that sees two processes
        # die gets the fault, which is right when nobody else kills them.
        before = judge.pids
        await asyncio.sleep(draw.uniform(0.05, 0.2))
        if scoring.done():
            break
        os.kill(draw.choice(before), signal.SIGKILL)
        killed += 1
        await until(lambda before=before: judge.pids != before)
    scores = await scoring
    pids = judge.pids
    await judge.close()
    assert killed > 0
    assert [s.outcome for s in scores] == [Outcome.OK] * len(samples)
    assert [s.score for s in scores] == [float(n) for n in range(len(samples))]
    assert not any(map(alive, pids))


def test_scoring_processes_end_with_a_killed_service(tmp_path: Path) -> None:
    path = tmp_path / "reward.py"
    path.write_text("def stuck(**kwargs):\n    while True:\n        pass\n")
    with subprocess.Popen(
        [sys.executable, "-c", SERVICE, str(path)], stdout=subprocess.PIPE, text=True
    ) as service:
        assert service.stdout is not None
        pids = [int(pid) for pid in service.stdout.readline().split()]
        assert len(pids) == 2
        assert all(map(alive, pids))
        service.kill()
    deadline = time.monotonic() + 20
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(map(alive, pids))
