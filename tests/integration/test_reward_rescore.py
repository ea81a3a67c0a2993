"""`meshrl reward rescore-run`: waiting rows are scored again, or one line says that they are not."""

from __future__ import annotations

import asyncio
from pathlib import Path

from click.testing import CliRunner, Result

from meshrl.cli.commands.reward import reward
from meshrl.config.loading import load_recipe
from meshrl.config.stages import train_spec
from meshrl.contract.ports import Queue
from meshrl.contract.rows import column_text
from meshrl.rewardd.registry.types import Submission
from meshrl.rpc.clients.operators import RewardRegistryClient
from meshrl.rpc.clients.queue import QueueClient
from meshrl.sandbox.sandbox import no_bubblewrap

from ..chaos.answered_rows import GROUP, admit_all, answer_all
from ..chaos.reward_service import Service, serving, write_recipe
from ..waiting import resident

GROUPS = 25
HEAD = "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"


async def rescore(queue: Service, *arguments: str) -> Result:
    command = ["rescore-run", "--queue", queue.address, "--run", "train", *arguments]
    return await asyncio.to_thread(CliRunner().invoke, reward, command)


async def ready(queue: Queue) -> None:
    await resident(queue, "train", "ready", GROUPS * GROUP)


async def test_resident_rows_are_scored_again_with_the_current_version(tmp_path: Path) -> None:
    (tmp_path / "base.py").write_text(HEAD + "    return 1\n")
    recipe = write_recipe(
        tmp_path,
        groups=GROUPS,
        group_size=GROUP,
        custom_reward_function={"path": str(tmp_path / "base.py")},
        sandbox="weak" if no_bubblewrap() else "strict",
    )
    queues = Service("queue", recipe)
    judge = Service("reward", recipe, ("--queue", queues.address))
    async with serving(queues), QueueClient(queues.address) as queue:
        await queue.open_run(train_spec(load_recipe(recipe, check=False)))
        await admit_all(queue, "train", GROUPS)
        await answer_all(queue, "train", GROUPS, lambda uid: f"{uid.index}")
        async with serving(judge):
            await ready(queue)
            async with RewardRegistryClient(judge.address) as client:
                version = (
                    await client.submit(Submission(name="reward", source=HEAD + "    return 2\n"))
                ).hash
            done = await rescore(queues)
            assert done.exit_code == 0, done.output
            assert f"{GROUPS * GROUP} of {GROUPS * GROUP} rows, " in done.stderr
            assert done.stdout.startswith(f"{GROUPS * GROUP} rows scored again in ")
        stuck = await rescore(queues, "--patience", "1.5")
        assert stuck.exit_code == 1
        assert f"{GROUPS * GROUP} rows still to be scored" in stuck.stderr
        async with serving(judge):
            batch = await queue.take(
                "train", epoch=1, step=0, groups=GROUPS, batch_id="b", wait_s=60
            )
            uids = [row.uid for row in batch.rows]
            rows = await queue.fetch_rows("train", uids, ("reward_hash", "reward"))
            seen = {(column_text(row["reward_hash"]), float(row["reward"][0])) for row in rows}
            assert seen == {(version, 2.0)}
