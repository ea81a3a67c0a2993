"""A queue killed with -9 at random moments of a run: nothing acknowledged is lost, nothing is trained twice.

CHAOS_SEED and CHAOS_KILLS in the environment make it another, or a longer, campaign.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
from asyncio.subprocess import PIPE, Process
from collections import Counter
from pathlib import Path

from meshrl.contract.nouns import Uid
from meshrl.transferqueue.queue import TransferQueue
from meshrl.transferqueue.stores.disk import DiskStore

SEED = int(os.environ.get("CHAOS_SEED", "7"))
KILLS = int(os.environ.get("CHAOS_KILLS", "8"))
TASKS_PER_KILL = 50
GROUP = 3
DEADLINE_S = 120.0


async def start(folder: Path, tasks: int) -> Process:
    """A host that has its queue open."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(Path(__file__).with_name("queue_process.py")),
        str(folder / "queue"),
        str(folder),
        str(tasks),
        stdout=PIPE,
    )
    assert await line_of(process) == "open"
    return process


async def line_of(process: Process) -> str:
    assert process.stdout is not None
    line = await asyncio.wait_for(process.stdout.readline(), DEADLINE_S)
    return line.decode().strip()


def told(folder: Path) -> list[list[str]]:
    """Whole lines of what the host acknowledged."""
    text = (folder / "acknowledged").read_text()
    return [line.split() for line in text.splitlines()]


async def check(folder: Path) -> None:
    """What was acknowledged is there or has left in a legal way; the ledger balances."""
    queue = await TransferQueue.open(DiskStore(folder / "queue"))
    ledger = await queue.ledger("run")
    assert ledger.balanced, ledger
    lines = told(folder)
    admitted = {line[1] for line in lines if line[0] == "admitted"}
    assert ledger.admitted >= GROUP * len(admitted)
    state = await queue.run_state("run")
    committed = max((int(line[1]) for line in lines if line[0] == "committed"), default=0)
    assert state.committed_step >= committed
    assert ledger.trained >= 0

    checkpoint = folder / "checkpoint.json"
    learned = json.loads(checkpoint.read_text()) if checkpoint.exists() else {}
    gone = {uid for uids in learned.values() for uid in uids}
    run = queue._runs["run"]
    stages = {stage.name: stage for stage in run.stages}
    for _, stage, name in (line for line in lines if line[0] == "wrote"):
        uid = Uid.parse(name)
        group = run.find(uid)
        if group is None:
            newer = run.by_task.get(uid.task)
            reissued = newer is not None and max(newer.attempts) > uid.attempt
            earlier_attempt = any(left.rpartition(".")[0] == name.rpartition(".")[0] for left in gone)
            assert name in gone or reissued or earlier_attempt, f"{stage} of {name} is lost"
        else:
            done = group.done[stages[stage].number]
            assert done >> uid.index & 1, f"{stage} of {name} was acknowledged and is undone"
            (columns,) = await queue.fetch("run", [uid], stages[stage].writes)
            assert set(columns) == set(stages[stage].writes)
    await queue.close()


async def test_a_queue_killed_at_random_moments_loses_and_repeats_nothing(tmp_path: Path) -> None:
    moments = random.Random(SEED)
    tasks = KILLS * TASKS_PER_KILL
    print(f"CHAOS_SEED={SEED} CHAOS_KILLS={KILLS}")
    kills = 0
    for _ in range(KILLS):
        process = await start(tmp_path, tasks)
        await asyncio.sleep(moments.uniform(0.0, 0.5))
        if process.returncode is None:
            process.kill()
            kills += 1
        await process.wait()
        await check(tmp_path)
    process = await start(tmp_path, tasks)
    assert await line_of(process) == "done"
    assert await process.wait() == 0
    await check(tmp_path)

    learned = json.loads((tmp_path / "checkpoint.json").read_text())
    trained = [uid for uids in learned.values() for uid in uids]
    assert max(Counter(trained).values()) == 1
    by_task = Counter(Uid.parse(uid).task for uid in trained)
    assert by_task == {f"t{number}": GROUP for number in range(tasks)}
    queue = await TransferQueue.open(DiskStore(tmp_path / "queue"))
    ledger = await queue.ledger("run")
    await queue.close()
    assert ledger.trained == len(trained)
    assert sum(ledger.resident.values()) == 0
    assert not ledger.dead_lettered
    assert kills == KILLS, f"only {kills} kills met a running host: raise TASKS_PER_KILL"
