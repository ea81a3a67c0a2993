"""A worker process that leases rows and obeys lines on stdin.

`busy S` keeps its event loop from running for S seconds, `write` answers all rows. It prints `holds N` after
leasing and `written N lost M` after a write. With --hung S, its event loop counts as hanging after S seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence
from functools import partial

from meshrl.contract.stage_worker import Intake, StageResult, StageWorker
from meshrl.contract.types import ROLLOUT_STAGE, LeasedRow, Version
from meshrl.rpc.clients.queue import HUNG_S, LeaseRenewer, QueueClient
from meshrl.testing.contract.queue_actors import rollout_of

RUN = "run"
VERSION = Version(1, 0)


async def work(options: argparse.Namespace) -> None:
    answered = asyncio.Event()

    async def handle(rows: Sequence[LeasedRow]) -> list[StageResult]:
        print(f"holds {len(rows)}", flush=True)
        await answered.wait()
        return [rollout_of(row, VERSION) for row in rows]

    renewer = partial(LeaseRenewer, hung_s=options.hung)
    async with QueueClient(options.queue, retry_s=60, renewer=renewer) as queue:
        loop = StageWorker(
            queue,
            [RUN],
            ROLLOUT_STAGE,
            handle,
            worker="w",
            intake=Intake(limit=options.rows, per_call=options.rows, version=lambda: VERSION),
        )
        running = asyncio.create_task(loop.run())
        while line := await asyncio.to_thread(sys.stdin.readline):
            word, *rest = line.split()
            if word == "busy":
                until = time.monotonic() + float(rest[0])
                while time.monotonic() < until:
                    pass
                print("idle", flush=True)
            else:
                answered.set()
                loop.drain()
                await running
                print(f"written {loop.stats.written} lost {loop.stats.lost}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--queue", required=True)
    parser.add_argument("--rows", type=int, required=True)
    parser.add_argument("--hung", type=float, default=HUNG_S)
    asyncio.run(work(parser.parse_args()))
