"""A queue process for tests of its clients: `python queue_host.py DIRECTORY [PORT]` prints its address and serves."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from meshrl.rpc.runtime import GrpcServer, ServerSettings
from meshrl.rpc.servicers import QueueServicer
from meshrl.transferqueue import stores
from meshrl.transferqueue.config import QueueConfig
from meshrl.transferqueue.queue import TransferQueue


async def main(directory: Path, port: int) -> None:
    config = QueueConfig(store="disk", reserve_bytes=0, durability="none")
    queue = await TransferQueue.open(stores.build(config, directory))
    settings = ServerSettings(port=port, metrics_port=None, drain_grace_s=1)
    async with GrpcServer(settings, [QueueServicer(queue)]) as server:
        await server.ready()
        print(server.address, flush=True)
        await server.until_stopped()
    await queue.close()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0))
