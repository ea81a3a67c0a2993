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
again, and only buckets that a replica lacks are sent. Who joins has one of two ranks until the next version.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from typing_extensions import override

from meshrl.common import shared_buffers
from meshrl.config.weights import WeightsConfig
from meshrl.contract.errors import (
    ConfigError,
    MeshError,
    UnavailableError,
    UserError,
    from_detail,
)
from meshrl.contract.ports import DeviceReceiver, LentBucket
from meshrl.contract.types import Uint8, WeightManifest
from meshrl.weights.carrier import DeviceChannel, Link, RunPaths
from meshrl.weights.groups import Groups
from meshrl.weights.nccl import messages
from meshrl.weights.nccl.process import Facts, NcclProcess, NcclProcesses
from meshrl.weights.waiting import within

logger = logging.getLogger(__name__)
_END_S = 10.0
"""How long the kernel may take to end a process that it was told to kill."""


class Carrier(Groups):
    """The processes of this end, and on the trainer's side the rendezvous."""

    def __init__(self, config: WeightsConfig, paths: RunPaths) -> None:
        """Raises ConfigError where cupy is missing, or NCCL is configured not to block."""
        super().__init__(config)
        self._processes = NcclProcesses(config.nccl)
        self._rendezvous = Rendezvous()

    @override
    async def listen(self) -> str:
        """Try a process, so that a missing GPU is reported before a replica joins; returns `host:port/token`."""
        try:
            process = await self._processes.take()
            await process.facts()
            self._processes.put_back(process)
            return await self._rendezvous.listen(self.config.host, self.config.port)
        except BaseException:
            await self.close()
            raise

    @override
    def channel(self, link: Link) -> NcclChannel:
        if link.rank == 0:
            self._rendezvous.expect(link.prefix, link.size)
        return NcclChannel(self.config, link, self._processes, self._rendezvous)

    @override
    async def close(self) -> None:
        await super().close()
        await self._rendezvous.close()
        await self._processes.close()


class NcclChannel(DeviceChannel):
    """One rank, in its process."""

    def __init__(
        self, config: WeightsConfig, link: Link, processes: NcclProcesses, rendezvous: Rendezvous
    ) -> None:
        self.config = config
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
        """Broadcast a bucket from its memory; other memory than a snapshot's is copied first."""
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
            made = await self._opened().receive(bucket, self.config.deadline_s(bucket.nbytes))
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
            await self._opened().broadcast(memory, self.config.deadline_s(memory.nbytes))
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


# How the ends of a channel find each other: the trainer listens, a replica connects, says its name, gets the id.
# The endpoint, `host:port/token`, goes to the replicas over the coordinator's own stream; a peer without the token is
# refused. One frame travels each way.


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingPeer:
    """The connection of a replica's end that waits for its answer."""

    facts: Facts
    rank: int
    _writer: asyncio.StreamWriter

    async def answer(self, unique_id: bytes) -> None:
        """Let it join. Raises UnavailableError when it has disconnected."""
        await self._send(unique_id=unique_id.hex())

    async def refuse(self, error: MeshError) -> None:
        """Send it the reason."""
        with contextlib.suppress(UnavailableError):
            await self._send(code=error.code, refused=str(error))

    def leave(self) -> None:
        """Close the connection; idempotent."""
        self._writer.close()

    async def _send(self, **frame: Any) -> None:
        try:
            self._writer.write(messages.pack(frame))
            await self._writer.drain()
        except OSError as error:
            raise UnavailableError(f"the replica's end closed: {error}") from error
        finally:
            self._writer.close()


class _Expected:
    """The other ends of one channel: those that have come, and all once they have; None after `forget`."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.peers: dict[int, WaitingPeer] = {}
        self.all: asyncio.Future[list[WaitingPeer] | None] = (
            asyncio.get_running_loop().create_future()
        )

    def wants(self, rank: int) -> bool:
        """Whether this end may come, and has not."""
        return 1 <= rank <= self.count and rank not in self.peers and not self.all.done()

    def add(self, peer: WaitingPeer) -> None:
        """Note that a peer has joined."""
        self.peers[peer.rank] = peer
        if len(self.peers) == self.count:
            self.all.set_result(list(self.peers.values()))


class Rendezvous:
    """The trainer's side: one listening socket for all channels."""

    def __init__(self) -> None:
        self._server: asyncio.Server | None = None
        self._token = secrets.token_hex(16)
        self._expected: dict[str, _Expected] = {}
        self._callers: set[asyncio.StreamWriter] = set()

    async def listen(self, host: str, port: int) -> str:
        """The endpoint. Raises ConfigError when it cannot be had."""
        try:
            self._server = await asyncio.start_server(self._accept, host, port)
        except OSError as error:
            raise ConfigError(
                f"weights.host/port: cannot listen on {host}:{port} ({error.strerror})"
            ) from error
        return f"{host}:{self._server.sockets[0].getsockname()[1]}/{self._token}"

    def expect(self, prefix: str, size: int) -> None:
        """Accept the other ends of the channel `prefix`, ranks 1 to `size` - 1, each once."""
        self._expected[prefix] = _Expected(size - 1)

    async def wait_for(self, prefix: str) -> list[WaitingPeer]:
        """The other ends, once all have connected; the caller has the deadline.

        Raises:
            UnavailableError: after `forget`.
        """
        expected = self._expected.get(prefix)
        peers = await asyncio.shield(expected.all) if expected is not None else None
        if peers is None:
            raise UnavailableError("it was aborted")
        return peers

    def forget(self, prefix: str) -> None:
        """Forget an ended channel; idempotent."""
        expected = self._expected.pop(prefix, None)
        if expected is None:
            return
        if not expected.all.done():
            expected.all.set_result(None)
        for peer in expected.peers.values():
            peer.leave()

    async def close(self) -> None:
        """Stop listening, disconnect all peers; idempotent."""
        for prefix in list(self._expected):
            self.forget(prefix)
        for writer in self._callers:
            writer.close()
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._callers.add(writer)
        try:
            hello = await messages.greeting(reader, self._token)
            expected = self._expected.get(str(hello.get("prefix")))
            rank = hello.get("rank")
            if expected is None or not isinstance(rank, int) or not expected.wants(rank):
                raise UnavailableError(f"no end waits for weight channel {hello.get('prefix')}")
            facts = Facts(library=str(hello.get("library")), version=str(hello.get("version")))
            expected.add(WaitingPeer(facts=facts, rank=rank, _writer=writer))
            # The connection stays open until it is answered; the caller of `wait_for` has a deadline.
            await writer.wait_closed()
        except (MeshError, OSError) as error:
            logger.warning("a connection to the weight carrier was refused: %s", error)
        finally:
            self._callers.discard(writer)
            writer.close()


async def connect(endpoint: str, prefix: str, facts: Facts, rank: int = 1) -> bytes:
    """The replica's side: the unique id, bytes[128]; the caller has the deadline.

    Raises:
        UnavailableError: no listener, or the trainer's end aborted the channel.
        MeshError: the reason why the trainer's end refuses.
    """
    address, _, token = endpoint.partition("/")
    host, _, port = address.rpartition(":")
    try:
        reader, writer = await asyncio.open_connection(host, int(port))
    except (OSError, ValueError) as error:
        raise UnavailableError(
            f"no trainer's end of the weight channel at {address}: {error}"
        ) from error
    try:
        hello = {"token": token, "prefix": prefix, "rank": rank, **asdict(facts)}
        writer.write(messages.pack(hello))
        answer = await messages.read(reader)
    finally:
        writer.close()
    if answer is None:
        raise UnavailableError(
            f"the trainer's end of weight channel {prefix} closed the connection"
        )
    if "refused" in answer:
        raise from_detail(answer["code"], answer["refused"], {})
    return bytes.fromhex(answer["unique_id"])


def check_same_nccl(trainer: Facts, replica: Facts) -> None:
    """Raises ConfigError unless both can be ranks of one communicator."""
    if trainer.library != replica.library:
        raise ConfigError(
            f"weights.nccl.library is {trainer.library} at the trainer, {replica.library} at the replica"
        )
    if trainer.version != replica.version:
        raise ConfigError(
            f"the trainer has NCCL {trainer.version}, the replica {replica.version}, and all ranks need the "
            "identical one: give both the same libnccl.so.2 (weights.nccl.env: LD_PRELOAD)"
        )
