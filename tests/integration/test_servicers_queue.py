"""The transfer queue through its servicer and client: sockets, and a queue that is killed and comes back.

Its contract over gRPC is in `tests/contract/test_queue_over_grpc.py`.
"""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import PIPE, Process
from pathlib import Path

from meshrl.launcher.address_book import free_port
from meshrl.rpc.clients.queue import QueueClient
from meshrl.testing.contract.queue_actors import Actors, rollout_of, spec, tasks, tokens_of

from ..listening import sockets, unix_sockets
from ..waiting import answered

HOST = Path(__file__).with_name("client") / "queue_host.py"
LONG = 700_000
"""Tokens of a row that fills many messages."""


async def test_payload_goes_by_the_one_socket_of_grpc(queue_address: str) -> None:
    before = unix_sockets(), sockets()
    async with QueueClient(queue_address, retry_s=1) as client:
        actors = Actors(client)
        await actors.start(spec(batch_groups=1))
        await actors.feed(tasks(1))
        lease = await actors.lease()
        rows = [rollout_of(row, actors.version, tokens=LONG) for row in lease.rows]
        await client.write_rows("run", "rollout", tokens_of(lease), rows)
        await actors.write(await actors.lease("reward"))
        uids = [row.uid for row in (await actors.take(0, groups=1)).rows]
        found = await client.fetch_rows("run", uids, ["tokens"])
        assert [columns["tokens"].tolist() == list(range(LONG)) for columns in found] == [True] * 2
        assert unix_sockets() == before[0]
        assert sockets() == before[1]


async def start(path: Path, port: int) -> Process:
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(HOST), str(path), str(port), stdout=PIPE
    )
    assert process.stdout is not None
    assert await process.stdout.readline() == f"127.0.0.1:{port}\n".encode()
    return process


async def test_calls_survive_a_queue_that_is_killed_during_a_long_poll_and_restarts(
    tmp_path: Path,
) -> None:
    port = free_port("127.0.0.1")
    process = await start(tmp_path, port)
    async with QueueClient(f"127.0.0.1:{port}", retry_s=100) as client:
        actors = Actors(client)
        await actors.start()
        waiting = asyncio.create_task(actors.lease(wait_s=100))
        await answered(lambda: client.why_waiting("run"))
        process.kill()
        await process.wait()
        admitting = asyncio.create_task(actors.feed(tasks(1), wait_s=100))
        process = await start(tmp_path, port)
        try:
            assert await admitting == 1
            lease = await waiting
            await actors.write(lease)
            process.kill()
            await process.wait()
            writing = asyncio.create_task(actors.write(lease))
            process = await start(tmp_path, port)
            await writing
            assert await actors.resident() == {"pending": 2}
        finally:
            process.terminate()
            await process.wait()
