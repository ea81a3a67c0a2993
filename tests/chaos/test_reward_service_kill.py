"""kill -9 of the reward service while it scores a run and a submission changes its version."""

from __future__ import annotations

import asyncio
import contextlib
import random
from pathlib import Path

from meshrl.config.loading import load_recipe
from meshrl.config.stages import train_spec
from meshrl.contract.errors import MeshError
from meshrl.contract.ports import Queue
from meshrl.contract.rows import column_text
from meshrl.rewardd.registry.types import Case, Submission
from meshrl.rpc.clients.operators import RewardRegistryClient
from meshrl.rpc.clients.queue import QueueClient
from meshrl.sandbox.sandbox import no_bubblewrap

from ..waiting import until
from .answered_rows import GROUP, admit_all, answer_all
from .reward_service import Service, serving, write_recipe

GROUPS = 60
KILLS = 3
SOURCE = """
import time

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    time.sleep(0.02)
    return {factor} * float(solution_str)
"""


def submission(factor: int) -> Submission:
    case = Case(solution="2", score=2.0 * factor)
    return Submission(name="reward", source=SOURCE.replace("{factor}", str(factor)), cases=(case,))


def processes_of(marker: str) -> list[int]:
    """Processes whose command line names `marker`."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if marker.encode() in path.read_bytes():
                found.append(int(path.parent.name))
    return found


async def submit(address: str, factor: int) -> str | None:
    """The version; None when the service died before it answered."""
    async with RewardRegistryClient(address, retry_s=0) as client:
        with contextlib.suppress(MeshError):
            return (await client.submit(submission(factor))).hash
    return None


async def rewards(queue: Queue) -> list[tuple[str, float, float]]:
    """(version, reward, answer) of every row, once all are scored."""
    batch = await queue.take("train", epoch=1, step=0, groups=GROUPS, batch_id="b", wait_s=120)
    uids = [row.uid for row in batch.rows]
    rows = await queue.fetch_rows("train", uids, ("reward_hash", "reward", "response_text"))
    return [
        (
            column_text(row["reward_hash"]),
            float(row["reward"][0]),
            float(column_text(row["response_text"])),
        )
        for row in rows
    ]


async def test_a_service_killed_while_it_changes_versions_loses_neither_versions_nor_rows(
    tmp_path: Path,
) -> None:
    draw = random.Random(random.randrange(1 << 30))
    (tmp_path / "base.py").write_text(SOURCE.replace("{factor}", "1"))
    custom = {"path": str(tmp_path / "base.py")}
    sandbox = "weak" if no_bubblewrap() else "strict"
    recipe = write_recipe(
        tmp_path,
        groups=GROUPS,
        group_size=GROUP,
        custom_reward_function=custom,
        sandbox=sandbox,
    )
    queues = Service("queue", recipe)
    judge = Service("reward", recipe, ("--queue", queues.address))
    factors: dict[str, int] = {}
    async with serving(queues), QueueClient(queues.address) as queue:
        await queue.open_run(train_spec(load_recipe(recipe, check=False)))
        await admit_all(queue, "train", GROUPS)
        await answer_all(queue, "train", GROUPS, lambda uid: f"{uid.index + 1}.5")
        async with serving(judge):
            async with RewardRegistryClient(judge.address) as client:
                factors[(await client.names()).base] = 1
            answered: list[str] = []
            for factor in range(2, 2 + KILLS):
                submitting = asyncio.create_task(submit(judge.address, factor))
                await asyncio.sleep(draw.uniform(0.0, 1.5))
                await judge.kill()
                version = await submitting
                await judge.start()
                async with RewardRegistryClient(judge.address) as client:
                    found = await client.names()
                    known = list(found.names[0].versions) if found.names else []
                    # Answered versions are there, and the newest there is scores: a switch is made or it is not.
                    answered += [version] if version else []
                    assert set(answered) <= set(known)
                    assert found.scoring == (known[-1] if known else found.base)
                    assert version is None or found.scoring == version
                    for hash_ in set(known) - factors.keys():
                        factors[hash_] = factor
            assert await submit(judge.address, 9) is not None
            found_rows = await rewards(queue)
            ledger = await queue.ledger("train")
        assert ledger.balanced and not ledger.dead_lettered, ledger
    assert len(found_rows) == GROUPS * GROUP
    for hash_, reward, answer in found_rows:
        assert reward == factors.get(hash_, 9) * answer
    await until(lambda: not processes_of(str(tmp_path)))
