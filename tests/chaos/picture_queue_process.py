"""A queue that trains all its tasks, says `left`, and never gets to the removal of their pictures.

python -m tests.chaos.picture_queue_process STORE PICTURES
"""

from __future__ import annotations

import asyncio
import sys
import threading
from pathlib import Path

from meshrl.contract.picture_store import PictureFolders, PictureStore
from meshrl.contract.types import Media
from meshrl.transferqueue.operations.pictures import PictureRemover
from meshrl.transferqueue.queue import TransferQueue
from meshrl.transferqueue.stores.disk import DiskStore

from ..contract.queue_actors import Actors, spec, tasks


class Stuck(PictureFolders):
    """A removal lasts for ever."""

    def remove(self, run: str, folder: str) -> None:
        threading.Event().wait()


async def main(store: str, url: str) -> None:
    remover = PictureRemover(Stuck(url), alone=True)
    queue = await TransferQueue.open(DiskStore(Path(store)), pictures=remover)
    actors, pictures = Actors(queue), PictureStore(PictureFolders(url), inline_bytes=1)
    await actors.start(spec(max_staleness=9.0))
    await actors.feed(await pictures.admitted(tasks(4, media=(Media.of(b"seen by all"),))))
    await actors.work(limit=4)
    await actors.train(0)
    await actors.commit(1)
    print("left", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
