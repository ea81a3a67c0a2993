"""A client of a queue that obeys lines on stdin: `write` all rows that it leases, `fetch TASK` and hold it, `check`.

    python -m tests.chaos.shared_memory_process ADDRESS

It prints `written TASK DIGEST` for each row that was acknowledged, and `holds DIGEST ...` of what it holds now.
"""

from __future__ import annotations

import asyncio
import sys

import xxhash

from meshrl.contract.frames import Shared, pack
from meshrl.contract.types import ROLLOUT_STAGE, GroupRows, PackedGroup, Version
from meshrl.rpc.clients import QueueClient
from meshrl.testing.contract.queue_actors import rollout_of

NOW = Version(1, 0)
TOKENS = 40_000


async def write(client: QueueClient) -> None:
    number = 0
    while True:
        lease = await client.lease(
            ["run"], "rollout", worker="process", limit=1, version=NOW, wait_s=20
        )
        [row], [group] = lease.rows, lease.groups
        made = rollout_of(row, NOW, TOKENS)
        assert made.facts is not None
        number += 1
        columns = {**made.columns, "tokens": made.columns["tokens"] + number}
        frame = pack([columns])
        packed = PackedGroup(
            task=row.uid.task,
            indices=(0,),
            attempts=(row.uid.attempt,),
            token=group.token,
            frame=frame,
            facts=(made.facts,),
        )
        await client.write_packed("run", "rollout", [packed])
        print("written", row.uid.task, xxhash.xxh3_64_hexdigest(frame), flush=True)


async def fetched(client: QueueClient, task: str) -> memoryview:
    """The frame, in shared memory."""
    while True:
        asked = [GroupRows(task=task, indices=(0,), attempts=(0,))]
        [group] = await client.fetch_packed("run", asked, ROLLOUT_STAGE.writes)
        frame = memoryview(group.parts[0].frame)
        if isinstance(frame.obj, Shared):
            return frame


async def main(address: str) -> None:
    held: list[memoryview] = []
    async with QueueClient(address, retry_s=20) as client:
        while line := await asyncio.to_thread(sys.stdin.readline):
            word, *rest = line.split()
            if word == "write":
                await write(client)
            if word == "fetch":
                held.append(await fetched(client, *rest))
            print("holds", *map(xxhash.xxh3_64_hexdigest, held), flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
