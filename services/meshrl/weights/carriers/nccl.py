"""Weights over NCCL: one communicator of the whole fleet, each rank in a process of its own that can be killed.

    trainer's process ── shared memory ──▶ NCCL process ═ GPU ═▶ NCCL process ── shared memory ──▶ replica's process
                      ◀── messages, socket  rank 0         ║      rank 1      ── messages, socket ▶
                                                           ╚═▶ NCCL process, rank 2 ──▶ …

NCCL blocks: only the end of the process ends a wait for the other ranks, and a broadcast waits for a dead rank for
ever. So no engine and no trainer calls it. Every end of a channel starts a process, which imports torch
and cupy and nothing of an engine; whatever goes wrong there, it is killed. Bytes go as uint8 from the snapshot's
memory, which the process maps and pins, through device memory that is neither torch's nor the engine's, into the
memory that engines are given. An engine that lends memory of the same device gets them there, with no copy on a host.

The replicas that take a version together are one communicator, into which the trainer sends each bucket once (see
`groups.py`). One that dies stops the broadcast to all: all processes are killed, the others are one communicator
again, and only buckets that somebody lacks are sent. Who joins has one of two ranks until the next version.
"""

from __future__ import annotations

import asyncio

import numpy as np
from typing_extensions import override

from meshrl.common import shared_buffers
from meshrl.config.weights import WeightsConfig
from meshrl.contract.errors import MeshError, UnavailableError, UserError
from meshrl.contract.ports import DeviceReceiver, LentBucket, WeightSource
from meshrl.contract.types import Uint8, WeightManifest
from meshrl.weights.carrier import DeviceChannel, Link, RunPaths
from meshrl.weights.nccl.process import Facts, NcclProcess, NcclProcesses
from meshrl.weights.nccl.rendezvous import Rendezvous, WaitingPeer, check_same_nccl, connect
from meshrl.weights.waiting import within

NEEDS = ("cupy", "cuda")
GROUPS = True
STREAMS = True

_END_S = 10.0
"""How long the kernel may take to end a process that it was told to kill."""


class Carrier:
    """The processes of this end, and on the trainer's side the rendezvous."""

    def __init__(self, config: WeightsConfig, paths: RunPaths) -> None:
        """Raises ConfigError where cupy is missing, or NCCL is configured not to block."""
        self._config = config
        self._processes = NcclProcesses(config.nccl)
        self._rendezvous = Rendezvous()

    async def listen(self) -> str:
        """Try a process, so that a missing GPU is reported before a replica joins; returns `host:port/token`."""
        try:
            process = await self._processes.take()
            await process.facts()
            self._processes.put_back(process)
            return await self._rendezvous.listen(self._config.host, self._config.port)
        except BaseException:
            await self.close()
            raise

    async def stage(self, source: WeightSource) -> None:
        """Does nothing: buckets are copied from the source's memory."""

    def channel(self, link: Link) -> NcclChannel:
        """One rank."""
        if link.rank == 0:
            self._rendezvous.expect(link.prefix, link.size)
        return NcclChannel(self._config, link, self._processes, self._rendezvous)

    async def close(self) -> None:
        """Stop listening, and end all processes."""
        await self._rendezvous.close()
        await self._processes.close()


class NcclChannel(DeviceChannel):
    """One rank, in its process."""

    def __init__(
        self, config: WeightsConfig, link: Link, processes: NcclProcesses, rendezvous: Rendezvous
    ) -> None:
        self._config = config
        self._link = link
        self._processes = processes
        self._rendezvous = rendezvous
        self._process: NcclProcess | None = None
        self._aborted = False

    @override
    async def open(self, deadline_s: float) -> None:
        """Compare versions, exchange the unique id, join, warm up; the process is killed past the deadline.

        Raises:
            ConfigError: the ends have different versions of NCCL, or this one has no GPU.
            UnavailableError: the other end did not connect, or either failed.
        """
        try:
            await within(self._join(deadline_s), deadline_s, "joining")
        except UserError as error:
            self.abort()
            raise type(error)(f"{self._where}: {error}") from error
        except MeshError as error:
            self.abort()
            raise UnavailableError(f"{self._where}: {error}") from error
        except BaseException:
            self.abort()
            raise
        self._processes.prepare()

    @override
    async def send(self, manifest: WeightManifest, index: int, bucket: Uint8) -> None:
        """The process broadcasts a bucket from where it lies; other memory than a snapshot's is copied first."""
        shared = _shared(bucket)
        if shared is not bucket:
            await asyncio.to_thread(np.copyto, shared, bucket)
        await self._broadcast(shared)

    @override
    async def receive(self, manifest: WeightManifest, index: int, into: Uint8) -> None:
        """Take part in the broadcast, straight into memory that can be shared; other memory is copied to."""
        shared = _shared(into)
        await self._broadcast(shared)
        if shared is not into:
            await asyncio.to_thread(np.copyto, into, shared)

    @property
    @override
    def device(self) -> Lending | None:
        """This end, as the receiver of what arrives in memory that is lent; None: where that cannot be."""
        process = self._process
        if process is None or not process.gpu or not self._processes.may_be_lent:
            return None
        return Lending(process, self._processes)

    @override
    async def receive_lent(self, bucket: LentBucket) -> str:
        """Take part in the broadcast, into memory of the device; its digest, see `meshrl.common.chunk_digest`."""
        try:
            made = await self._opened().receive(bucket, self._config.deadline_s(bucket.nbytes))
        except MeshError as error:
            self._processes.received_lent(well=False)
            raise UnavailableError(f"{self._where}: {error}") from error
        self._processes.received_lent(well=True)
        return made

    @override
    def abort(self) -> None:
        """Kill the process; every wait for it raises UnavailableError."""
        self._aborted = True
        self._rendezvous.forget(self._link.prefix)
        if self._process is not None:
            self._process.kill()

    @override
    async def close(self) -> None:
        """Let the process abort its communicator and end."""
        self._aborted = True
        self._rendezvous.forget(self._link.prefix)
        if self._process is not None:
            await self._process.leave()

    @property
    def _where(self) -> str:
        return f"weight channel {self._link.prefix}, rank {self._link.rank}"

    async def _join(self, deadline_s: float) -> None:
        self._process = process = await self._processes.take()
        if self._aborted:  # while it was being started
            raise UnavailableError("it was aborted")
        facts = await process.facts()
        if self._link.rank == 0:
            peers = await self._rendezvous.wait_for(self._link.prefix)
            try:
                for peer in peers:
                    await _check(facts, peer)
                unique_id = await process.unique_id()
            except MeshError as error:
                for peer in peers:  # the cause, if it is one of them, has been told
                    await peer.refuse(UnavailableError(str(error)))
                raise
            for peer in peers:
                await peer.answer(unique_id)
        else:
            unique_id = await connect(
                self._link.endpoint, self._link.prefix, facts, self._link.rank
            )
        await process.join(self._link.size, unique_id, self._link.rank, deadline_s)

    async def _broadcast(self, memory: Uint8) -> None:
        try:
            await self._opened().broadcast(memory, self._config.deadline_s(memory.nbytes))
        except MeshError as error:
            raise UnavailableError(f"{self._where}: {error}") from error

    def _opened(self) -> NcclProcess:
        if self._process is None or self._aborted:
            raise UnavailableError("it is not open")
        return self._process


class Lending(DeviceReceiver):
    """A process that an engine lends memory to."""

    def __init__(self, process: NcclProcess, processes: NcclProcesses) -> None:
        self.memory, self.gpu = process.memory, process.gpu
        self._process = process
        self._processes = processes

    async def settle(self) -> None:
        """Return once no process that was killed can write any more. Raises UnavailableError."""
        await self._processes.settle(_END_S)

    async def reach(self, bucket: LentBucket) -> None:
        """Open and close it. Raises UnavailableError."""
        await self._process.reach(bucket)


def _shared(memory: Uint8) -> Uint8:
    """This memory, or else as much that the process can map."""
    return memory if shared_buffers.find(memory) else shared_buffers.allocate([memory.nbytes])[0]


async def _check(facts: Facts, peer: WaitingPeer) -> None:
    """Refuse an end that has another NCCL. Raises ConfigError too."""
    try:
        check_same_nccl(trainer=facts, replica=peer.facts)
    except MeshError as error:
        await peer.refuse(error)
        raise
