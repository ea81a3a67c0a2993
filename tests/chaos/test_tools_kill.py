"""kill -9 at an MCP server in the middle of a call, and at the worker that started it."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path

import pytest

from meshrl.contract import rows
from meshrl.contract.types import ROLLOUT_COLUMNS, ROLLOUT_STAGE, Trajectory
from meshrl.testing.contract.queue_actors import Actors, spec
from meshrl.transferqueue.queue import TransferQueue
from tests.doubles.scripted import task

from ..processes import python
from ..unit.rollout.chats import chat_tokenizer
from ..waiting import gone, until
from .tools_process import CALL, RUN

TOKENIZER = chat_tokenizer()


class Mesh:
    """A queue behind a servicer, and the notes of the MCP servers."""

    def __init__(self, queue: TransferQueue, address: str, log: Path) -> None:
        self.queue = queue
        self.address = address
        self.log = log

    def noted(self, what: str) -> list[str]:
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return [line for line in lines if line.startswith(what)]

    async def until_called(self, times: int) -> None:
        await until(lambda: len(self.noted("called")) >= times)

    async def row(self) -> Trajectory:
        batch = await self.queue.take(RUN, epoch=1, step=0, groups=1, batch_id="b", wait_s=60)
        (found,) = batch.rows
        (columns,) = await self.queue.fetch_rows(RUN, [found.uid], ROLLOUT_COLUMNS)
        return rows.trajectory(found.uid, columns)

    async def ended(self) -> None:
        """Wait until no server is left."""
        await gone(*(int(line.split()[1]) for line in self.noted("pid")))


def worker(mesh: Mesh, name: str) -> AbstractAsyncContextManager[asyncio.subprocess.Process]:
    return python("-m", "tests.chaos.tools_process", mesh.address, mesh.log, name)


@pytest.fixture
async def mesh(queue: TransferQueue, queue_address: str, tmp_path: Path) -> Mesh:
    """A row of a policy that calls a tool waits for its worker."""
    actors = Actors(queue, RUN)
    await actors.start(
        spec(
            RUN,
            group_size=1,
            stages=(ROLLOUT_STAGE,),
            batch_groups=1,
            max_attempts=5,
            lease_ttl_s=6.0,
        )
    )
    await actors.feed([replace(task(TOKENIZER), run=RUN, program="tools")])
    await queue.close_feed(RUN)
    return Mesh(queue, queue_address, tmp_path / "log")


def check(row: Trajectory) -> None:
    text = TOKENIZER.decode_all(row.tokens.tolist())
    said = TOKENIZER.decode_all(row.tokens[row.loss_mask.astype(bool)].tolist())
    assert said == f"{CALL}It is 42.<|end|>"
    assert text.endswith("<|start|>tool\n42<|end|>\n<|start|>assistant\nIt is 42.<|end|>")


async def test_a_server_killed_in_a_call_costs_an_attempt_and_the_row_goes_on(mesh: Mesh) -> None:
    async with worker(mesh, "w0") as process:
        await mesh.until_called(1)
        os.kill(int(mesh.noted("pid")[0].split()[1]), signal.SIGKILL)
        row = await mesh.row()
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 0
        ledger = await mesh.queue.ledger(RUN)
    check(row)
    assert ledger.balanced and not ledger.dead_lettered
    assert len(mesh.noted("called")) == 2 and len(mesh.noted("pid")) == 2
    await mesh.ended()


async def test_a_killed_worker_leaves_no_server_and_another_goes_on(mesh: Mesh) -> None:
    async with worker(mesh, "w0") as process:
        await mesh.until_called(1)
        process.kill()
        await process.wait()
        await mesh.ended()
    async with worker(mesh, "w1") as process:
        row = await mesh.row()
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 0
    assert (await mesh.queue.ledger(RUN)).balanced
    check(row)
    await mesh.ended()
