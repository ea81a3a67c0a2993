"""`meshrl up` with a queue of several processes: one is killed, and the books stay exact."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from meshrl.contract.nouns import Ledger
from meshrl.services.config import load_recipe
from meshrl.services.queues import build_store, stored_queue
from meshrl.transferqueue.sharding.shard import ShardQueue

from ..mesh import Mesh, make_mesh


async def books(mesh: Mesh, shards: int) -> tuple[Ledger, list[Ledger]]:
    """The ledger of the run, and that of each shard."""
    recipe = load_recipe(mesh.run_dir / "recipe.yaml", check=False)
    assert recipe.queue.shards == shards
    async with stored_queue(recipe) as queue:
        whole = await queue.ledger("tiny")
    parts = []
    for number in range(shards):
        shard = await ShardQueue.open(build_store(recipe, number))
        parts.append(await shard.ledger("tiny"))
        await shard.close()
    assert whole.balanced and all(part.balanced for part in parts)
    return whole, parts


def counted(ledgers: list[Ledger]) -> Mapping[str, int]:
    return {
        "admitted": sum(one.admitted for one in ledgers),
        "trained": sum(one.trained for one in ledgers),
    }


def test_a_run_on_two_shards_outlives_the_kill_of_one(tmp_path: Path) -> None:
    mesh = make_mesh(tmp_path)
    with mesh.up("queue.shards=2") as process:
        mesh.wait_for_step(process, 1)
        os.kill(mesh.pid("queue-1"), signal.SIGKILL)
        mesh.wait(process)
    assert "queue-1 was killed by SIGKILL" in mesh.output
    assert [line["step"] for line in mesh.steps()] == [0, 1, 2, 3]
    whole, parts = asyncio.run(books(mesh, 2))
    assert whole.trained == 4 * 16
    assert all(part.trained for part in parts)
    assert counted([whole]) == counted(parts)
    told = subprocess.run(
        [sys.executable, "-m", "meshrl.services.cli", "ledger", "--run-dir", str(mesh.run_dir)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert f"{whole.admitted:,}" in told.stdout
