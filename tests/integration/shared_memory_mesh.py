"""A queue that shares memory with clients of the test: rows of one long frame each, written, read and dropped."""

from __future__ import annotations

import asyncio
import gc
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np

from meshrl.contract import codec
from meshrl.contract.frames import Room, Shared, pack
from meshrl.contract.types import (
    ROLLOUT_STAGE,
    GroupRows,
    PackedGroup,
    RunSpec,
    Task,
    Version,
)
from meshrl.rpc.clients import QueueClient
from meshrl.rpc.local_socket.client import LocalSocket
from meshrl.rpc.local_socket.mapped_memory import MappedMemory
from meshrl.rpc.local_socket.shared_memory import (
    REGION_BYTES,
    Caller,
    Grant,
    SharedMemory,
    Word,
)
from meshrl.rpc.local_socket.wire import Kind, Wire
from meshrl.rpc.runtime import GrpcServer
from meshrl.rpc.servicers import QueueServicer
from meshrl.testing.contract.queue_actors import rollout_of
from meshrl.transferqueue.queue import TransferQueue
from meshrl.v1 import queue_pb2 as pb
from meshrl.v1.local_socket_pb2 import CallHead

from ..waiting import until
from .test_local_socket import serving

SPEC = RunSpec(
    run="run",
    group_size=1,
    batch_groups=1,
    max_staleness=1_000,
    resident_batches=1_000,
    stages=(ROLLOUT_STAGE,),
)
NOW = Version(1, 0)
MEMORY = 32 << 20
LONG = 40_000
"""Tokens of a frame of 360 kB."""
REGION = 460_000
"""Of a frame that needs nearly a region."""


class Mesh:
    """A queue that shares memory, and rows of one frame each."""

    def __init__(self, server: GrpcServer, servicer: QueueServicer, queue: TransferQueue) -> None:
        self.server = server
        self.servicer = servicer
        self.queue = queue
        self.written: dict[str, bytes] = {}
        """The frame of each task that is there, the first one first."""
        self._tasks = 0
        self._steps = 0

    @property
    def memory(self) -> SharedMemory:
        local: Any = self.server._local
        found: SharedMemory = local._memory
        return found

    async def start(self, spec: RunSpec = SPEC) -> None:
        await self.queue.open_run(spec)
        await self.queue.acquire("run", "trainer")
        await self.queue.publish("run", NOW)

    def client(self) -> QueueClient:
        client = QueueClient(self.server.address, retry_s=20)
        client.local_socket.named(self.servicer.local_socket)
        return client

    async def group(self, tokens: int = LONG, room: Room | None = None) -> PackedGroup:
        """One row to write, whose frame is like no other."""
        self._tasks += 1
        task = Task(
            run="run",
            task_id=f"t{self._tasks}",
            prompt_ids=np.arange(3, dtype=np.int32),
            group_size=1,
        )
        await self.queue.admit("run", [task], cursor="", wait_s=5)
        lease = await self.queue.lease(
            ["run"], "rollout", worker="w", limit=1, version=NOW, wait_s=5
        )
        [row], [group] = lease.rows, lease.groups
        write = rollout_of(row, NOW, tokens)
        ids = np.random.default_rng(self._tasks).integers(0, 1 << 30, tokens, dtype=np.int32)
        columns = {**write.columns, "tokens": ids}
        assert write.facts is not None
        return PackedGroup(
            task=row.uid.task,
            indices=(0,),
            attempts=(0,),
            token=group.token,
            frame=pack([columns], room),
            facts=(write.facts,),
        )

    async def write(self, client: QueueClient, tokens: int = LONG) -> str:
        """A row; its task."""
        group = await self.group(tokens)
        self.written[group.task] = group.frame
        await client.write_packed("run", "rollout", [group])
        return group.task

    async def warm(self, client: QueueClient) -> None:
        """Write until regions are there to write to."""
        while not (memory := client.local_socket._memory) or not memory._stock:
            await self.write(client)
            await asyncio.sleep(0.001)
            if memory is not None and memory._read is not None:
                memory._hear()
        await self.drop_all()

    async def drop_all(self) -> None:
        """Train what is written: the queue has it no more."""
        while self.written:
            await self.drop()

    async def drop(self, wait_s: float = 5) -> None:
        """The row that was written first."""
        batch = await self.queue.take(
            *("run",),
            epoch=1,
            step=self._steps,
            groups=1,
            batch_id=f"b{self._steps}",
            wait_s=wait_s,
        )
        await self.queue.settle("run", epoch=1, step=self._steps, batch_id=f"b{self._steps}")
        self._steps += 1
        await self.queue.commit("run", epoch=1, step=self._steps)  # until then it can be rewound
        for row in batch.rows:
            del self.written[row.uid.task]

    async def fetch(self, client: QueueClient, task: str) -> memoryview:
        """The frame of a row, as it came."""
        asked = [GroupRows(task=task, indices=(0,), attempts=(0,))]
        [group] = await client.fetch_packed("run", asked, ROLLOUT_STAGE.writes)
        [part] = group.parts
        return memoryview(part.frame)

    async def freed(self) -> None:
        """Nothing but what writers and the service have at hand is taken."""

        def is_free() -> bool:
            gc.collect()
            stock = sum(len(caller._granted) for caller in self.memory.links)
            return self.memory.used_bytes <= (stock + 1) * REGION_BYTES and not any(
                caller._answers for caller in self.memory.links
            )

        async with asyncio.timeout(10):
            await until(is_free)


@asynccontextmanager
async def sharing(size: int = MEMORY, **settings: Any) -> AsyncIterator[Mesh]:
    async with serving(shared_bytes=size, **settings) as (server, servicer, queue):
        mesh = Mesh(server, servicer, queue)
        await mesh.start()
        yield mesh


def is_shared(frame: memoryview) -> bool:
    return isinstance(frame.obj, Shared)


class Raw:
    """A caller that speaks the protocol itself."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.local = LocalSocket()
        self.local.named(mesh.servicer.local_socket)

    @property
    def memory(self) -> MappedMemory:
        assert self.local._memory is not None
        return self.local._memory

    @property
    def caller(self) -> Caller:
        return self.mesh.memory.callers[self.memory.key]

    async def wire(self) -> Wire:
        found = await self.local.free_wire()
        assert found is not None
        return found

    async def begin(self, wire: Wire, method: str) -> None:
        head = CallHead(method=f"/meshrl.v1.Queue/{method}", memory_key=self.memory.key)
        await wire.send(Kind.HEAD, [head.SerializeToString()])

    async def ask(self, wire: Wire, task: str) -> None:
        rows = codec.encode_rows([GroupRows(task=task, indices=(0,), attempts=(0,))])
        request = pb.FetchRowsRequest(run="run", rows=rows, columns=ROLLOUT_STAGE.writes)
        await self.begin(wire, "Fetch")
        await wire.send(Kind.MESSAGE, [request.SerializeToString()])
        await wire.send(Kind.END)

    async def map(self, task: str) -> None:
        """Have the memory."""
        wire = await self.wire()
        await until(lambda: self.memory.key in self.mesh.memory.callers)
        await self.ask(wire, task)
        while (await wire.receive())[0] is not Kind.END:
            pass
        self.memory.receive()
        await until(lambda: self.caller.maps)

    def say(self, word: int, number: int) -> None:
        self.memory._link.socket.send(struct.pack("<Q", word << 56 | number))

    async def granted(self, wanted: int) -> list[Grant]:
        """What is granted."""
        self.say(Word.WANT, wanted)
        loop = asyncio.get_running_loop()
        packet = await loop.sock_recv(self.memory._link.socket, 1 << 10)
        said = np.frombuffer(packet, "<u8").tolist()
        return [Grant(*each) for each in zip(said[2::2], said[3::2], strict=True)]


@asynccontextmanager
async def raw() -> AsyncIterator[tuple[Raw, str, QueueClient]]:
    """A raw caller that has the memory, a task that lies there, a client of ours."""
    async with sharing() as mesh, mesh.client() as client:
        await mesh.warm(client)
        task = await mesh.write(client)
        caller = Raw(mesh)
        await caller.map(task)
        yield caller, task, client
        caller.local.close()
