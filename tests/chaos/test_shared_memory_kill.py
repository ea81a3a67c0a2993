"""Who shares memory with the queue is killed or stopped: what was acknowledged is there, what was held is freed."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import numpy as np
import xxhash

from meshrl.contract.types import Task
from meshrl.rpc.clients import QueueClient
from meshrl.rpc.local_socket.shared_memory import REGION_BYTES

from ..integration.shared_memory_mesh import (
    MEMORY,
    REGION,
    Mesh,
    is_shared,
    sharing,
)
from ..waiting import until
from .test_leases import HOST, Process, running

MODULE = ("-m", "tests.chaos.shared_memory_process")
WRITTEN = 12


async def admit(mesh: Mesh, names: list[str]) -> None:
    tasks = [
        Task(run="run", task_id=name, prompt_ids=np.arange(3, dtype=np.int32), group_size=1)
        for name in names
    ]
    assert await mesh.queue.admit("run", tasks, cursor="", wait_s=5) == len(tasks)


async def acknowledged(writer: Process, count: int) -> dict[str, str]:
    """Digest by task."""
    found: dict[str, str] = {}
    for _ in range(count):
        word, task, digest = (await writer.read()).split()
        assert word == "written"
        found[task] = digest
    return found


async def test_a_killed_writer_leaves_what_was_acknowledged_and_no_region_taken() -> None:
    async with sharing() as mesh, mesh.client() as client:
        await admit(mesh, [f"k{number}" for number in range(WRITTEN + 1)])
        async with running(*MODULE, mesh.server.address) as writer:
            writer.send("write")
            digests = await acknowledged(writer, WRITTEN)
            assert mesh.memory.links  # it has regions, in one of which it may be writing
            await writer.kill()
        await until(lambda: not any(link.handed_out for link in mesh.memory.links))
        for task, digest in digests.items():
            frame = await mesh.fetch(client, task)
            assert xxhash.xxh3_64_hexdigest(frame) == digest
            mesh.written[task] = bytes(frame)
        del frame
        await mesh.drop_all()
        await mesh.freed()


async def test_a_stopped_reader_reads_what_it_held_and_a_killed_one_holds_nothing() -> None:
    async with sharing(2 * MEMORY) as mesh, mesh.client() as client:
        await mesh.warm(client)
        task = await mesh.write(client)
        async with running(*MODULE, mesh.server.address) as reader:
            reader.send(f"fetch {task}")
            held = await reader.read()
            assert held == f"holds {xxhash.xxh3_64_hexdigest(mesh.written[task])}"
            reader.signal(signal.SIGSTOP)
            by_reference = 0
            for _ in range(4 * MEMORY // REGION_BYTES):
                by_reference += is_shared(
                    await mesh.fetch(client, await mesh.write(client, REGION))
                )
                await mesh.drop_all()
            assert by_reference > 0
            reader.signal(signal.SIGCONT)
            reader.send("check")
            assert await reader.read() == held
            assert sum(len(link._answers) for link in mesh.memory.links) >= 1
            await reader.kill()
        await mesh.freed()


async def test_what_a_client_holds_outlives_a_killed_queue_and_calls_go_on(tmp_path: Path) -> None:
    async with running(HOST, tmp_path) as host:
        address = await host.read()
        async with QueueClient(address, retry_s=30) as client:
            mesh = Mesh.__new__(Mesh)
            mesh.__dict__ |= {"queue": client, "written": {}, "_tasks": 0, "_steps": 0}
            await mesh.start()
            frame = await mesh.fetch(client, await mesh.write(client))
            while not is_shared(frame):
                frame = await mesh.fetch(client, await mesh.write(client))
            expected = bytes(frame)
            writing = asyncio.create_task(mesh.write(client))
            await host.kill()
            async with running(HOST, tmp_path, address.rpartition(":")[2]) as again:
                assert await again.read() == address
                await writing
                for _ in range(WRITTEN):
                    await mesh.write(client)
                for task, written in mesh.written.items():
                    assert await mesh.fetch(client, task) == written
                assert bytes(frame) == expected
                await mesh.drop_all()
