"""`meshrl up` with a queue of several processes: some are killed, one is added, and the ledger stays exact."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from meshrl.config import load_recipe
from meshrl.contract.types import Ledger
from meshrl.launcher.shards import with_recorded_shards
from meshrl.rpc.queue_connection import build_store, open_stored_queue
from meshrl.transferqueue.sharding import ShardQueue

from ..mesh import Mesh, make_mesh

pytestmark = pytest.mark.slow


async def ledgers_of(mesh: Mesh, shards: int) -> tuple[Ledger, list[Ledger]]:
    """The ledger of the run, and that of each shard."""
    recipe = load_recipe(mesh.run_dir / "recipe.yaml", check=False)
    assert recipe.queue.shards == shards
    async with open_stored_queue(recipe) as queue:
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


def meshrl(mesh: Mesh, *words: str) -> str:
    """What a command about a mesh prints."""
    command = [sys.executable, "-m", "meshrl.cli", *words, "--run-dir", str(mesh.run_dir)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stderr + mesh.output[-3000:]
    return ended.stdout


def test_a_shard_is_added_while_a_run_goes_on_and_everybody_who_starts_again_finds_it(
    tmp_path: Path,
) -> None:
    mesh = make_mesh(tmp_path)
    with mesh.up("queue.shards=2", "trainer.total_training_steps=100000") as process:
        mesh.wait_for_step(process, 1)
        line = meshrl(mesh, "queue", "add-shard")
        assert line == "queue-2 is added: the queue has 3 shards\n"
        for victim in ("queue-1", "queue-2", "feeder", "trainer"):
            os.kill(mesh.pid(victim), signal.SIGKILL)
        mesh.wait_for_step(process, len(mesh.steps()) + 8)
        process.send_signal(signal.SIGINT)
        mesh.wait(process, code=128 + signal.SIGINT)
    assert "queue-1 was killed by SIGKILL" in mesh.output
    whole, parts = asyncio.run(ledgers_of(mesh, 3))
    assert all(part.trained for part in parts)
    assert counted([whole]) == counted(parts)
    assert f"{whole.admitted:,}" in meshrl(mesh, "ledger")
    # The next start has as many queue processes, whatever the recipe says.
    recipe = load_recipe(mesh.recipe, ["queue.shards=2"], check=False)
    assert recipe.queue.shards == 2 and with_recorded_shards(recipe).queue.shards == 3
