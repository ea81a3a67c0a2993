"""A queue is killed between the commit by which tasks have left and the removal of their pictures."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from meshrl.contract.picture_store import PictureFolders, PictureStore
from meshrl.contract.types import Media
from meshrl.transferqueue.operations.pictures import PictureRemover
from meshrl.transferqueue.queue import TransferQueue
from meshrl.transferqueue.stores.disk import DiskStore

from ..contract.queue_actors import WAIT_S, Actors

ROOT = Path(__file__).parents[2]


async def test_the_next_queue_removes_them_and_no_others(tmp_path: Path) -> None:
    url = str(tmp_path / "pictures")
    arguments = ("-m", "tests.chaos.picture_queue_process", str(tmp_path / "queue"), url)
    process = await asyncio.create_subprocess_exec(
        sys.executable, *arguments, stdout=asyncio.subprocess.PIPE, cwd=ROOT
    )
    assert process.stdout is not None
    async with asyncio.timeout(6 * WAIT_S):
        assert await process.stdout.readline() == b"left\n"
    process.kill()
    await process.wait()
    folders = PictureFolders(url)
    assert len(folders.tasks("run")) == 4

    remover = PictureRemover(folders, alone=True)
    queue = await TransferQueue.open(DiskStore(tmp_path / "queue"), pictures=remover)
    async with asyncio.timeout(WAIT_S):
        while len(folders.tasks("run")) > 2:  # noqa: ASYNC110 (a thread removes)
            await asyncio.sleep(0.01)
    actors = Actors(queue)
    actors.version = (await queue.run_state("run")).published
    ledger = await actors.ledger()
    assert (ledger.trained, ledger.resident["queued"]) == (4, 4)
    reader = PictureStore(folders, inline_bytes=1)
    for row in (await actors.lease()).rows:
        seen = await reader.get("run", row.uid.task, row.task.media)
        assert seen == (Media.of(b"seen by all"),)
    await queue.close()
    reader.close()
