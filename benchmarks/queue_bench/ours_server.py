"""Our own side: one queue service over gRPC, as `meshrl up` runs it.

    python ours_server.py PATH '{"store": "disk", ...}'

The second argument is a recipe's `queue:` section. Prints one line of JSON, {"address": ..., "server": [pid]}, and
ends with stdin.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

from meshrl.rpc.process_memory import collect_garbage_rarely, limit_malloc_arenas
from meshrl.rpc.runtime import GrpcServer, ServerSettings, run_service
from meshrl.rpc.servicers import QueueServicer
from meshrl.transferqueue import stores
from meshrl.transferqueue.config import QueueConfig
from meshrl.transferqueue.queue import TransferQueue


async def main(path: Path, section: str) -> None:
    config = QueueConfig(**json.loads(section))
    collect_garbage_rarely()
    limit_malloc_arenas()
    queue = await TransferQueue.open(stores.build(config, path))
    try:
        settings = ServerSettings(drain_grace_s=1)
        async with GrpcServer(settings, [QueueServicer(queue)]) as server:
            await server.ready()
            print(json.dumps({"address": server.address, "server": [os.getpid()]}), flush=True)
            await asyncio.to_thread(sys.stdin.read)
    finally:
        await queue.close()


if __name__ == "__main__":
    sys.exit(run_service(lambda: main(Path(sys.argv[1]), sys.argv[2])))
