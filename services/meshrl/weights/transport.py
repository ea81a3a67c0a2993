"""The port of a way for weights, and `Pairs`, which has a channel of two ends to each replica.

    coordinator ─▶ Replica ─▶ Delivery ── PROPOSE, TRANSFER, bytes ──▶ Arrival ─▶ Joining ─▶ engine

A transport is `send(version, receivers)` beside the trainer and `receive(plan)` beside an engine. It owns the
channels and who shares one, the memory in which a version arrives, and the deadlines; it knows nothing of what is
committed when. It is the class `Carrier` of a file in `carriers/`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeAlias, TypeVar

from typing_extensions import override

from meshrl.common import plugins
from meshrl.config.weights import CARRIERS, WeightsConfig
from meshrl.contract.errors import (
    ConflictError,
    CorruptError,
    InfraError,
    UnavailableError,
    UserError,
)
from meshrl.contract.ports import WeightSource
from meshrl.contract.types import Version
from meshrl.v1 import weights_pb2 as pb
from meshrl.weights.carrier import Carrier, Channel, Link, RunPaths
from meshrl.weights.messages import (
    Peer,
    Receiver,
    check_source,
    chunk_digest,
    gathered,
    manifest_to_message,
    whole,
)
from meshrl.weights.receiving import Arrival
from meshrl.weights.waiting import together

_T = TypeVar("_T")
_RESENDS = 2
"""How often a bucket that arrives corrupted is sent again: a third time is no accident of the network."""
Step: TypeAlias = Callable[[], Coroutine[Any, Any, None]]
"""Something that is done at the right moment of another thing."""


class GroupError(InfraError):
    """A replica gets nothing by the channel that it shares with others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceivePlan:
    """How a version comes to this process: the coordinator's PROPOSE."""

    carrier: str
    link: Link
    arrival: Arrival
    """The part of it that is here, perhaps by an earlier plan."""


class Transport(Protocol):
    """A way for weights, of one process."""

    names: tuple[str, ...]
    """The carriers by which this process can be reached."""

    async def load(self) -> None:
        """Import what takes long. Raises ConfigError."""
        return

    async def close(self) -> None:
        """Free everything; idempotent."""
        return

    # In the trainer's process.

    async def start(self) -> None:
        """Be ready for receivers. Raises ConfigError."""
        ...

    def reaches(self, peer: Peer) -> bool:
        """Whether weights can get there."""
        ...

    async def send(self, source: WeightSource, receivers: Sequence[Receiver]) -> Sequence[Delivery]:
        """Make a version ready to leave, to those who take it together.

        The first call for a version is for all its members, later ones for those that join. The deliveries, in their
        order, move nothing before `propose`.

        Raises:
            SourceError: the version was not gathered.
            MeshError: it cannot be made ready.
        """
        ...

    def leave(self, receiver: Receiver) -> None:
        """Remove the receiver; idempotent, never waits."""
        ...

    # Beside an engine.

    async def receive(self, plan: ReceivePlan) -> None:
        """Open this end, make room in the plan's arrival, and answer READY. Raises MeshError."""
        ...

    def committed(self, version: Version) -> None:
        """Note that the engine serves the version."""
        ...

    async def disconnect(self) -> None:
        """End this joining's channels; idempotent."""
        ...


def check_reached(transport: Transport, peer: Peer) -> None:
    """Raises UserError, saying why, for a replica that no carrier reaches."""
    if not transport.reaches(peer):
        theirs, ours = (", ".join(names) or "none" for names in (peer.carriers, transport.names))
        raise UserError(
            f"no carrier of weights reaches {peer.name}: the trainer can {ours}, it can {theirs}, and it is on"
            f" {'this' if peer.shares_memory else 'another'} host;"
            " set weights.carrier to auto, or to the same one on both sides (gloo reaches other hosts)"
        )


class Pairs(Transport):
    """The base of a carrier whose channels have two ends."""

    def __init__(self, config: WeightsConfig) -> None:
        self.config = config
        """The section `weights`, with this carrier's name and port."""
        self.names = (config.carrier,)
        self.endpoint = ""
        """The address of the listening carrier; empty before."""
        self.refused: Callable[[UserError], None] | None = None
        """Called when this process cannot open its end, if another carrier may be taken then."""
        self._listening = False
        self._staged: deque[Version] = deque(maxlen=config.keep)
        self._lock = asyncio.Lock()
        self.channels: dict[int, Channel] = {}
        """The trainer's ends, by generation; open, or being opened."""
        self._end: tuple[Link, Channel] | None = None
        """The replica's end, of two or of more."""

    # What a carrier defines.

    async def listen(self) -> str:
        """Trainer's process: be ready for channels; returns the endpoint that is sent to the replicas."""
        raise NotImplementedError

    async def stage(self, source: WeightSource) -> None:
        """Trainer's process: called once per version, before a channel sends it. Its buckets may still come."""
        return

    def channel(self, link: Link) -> Channel:
        """One end of a channel, not yet open."""
        raise NotImplementedError

    async def hand_over(
        self, channel: Channel, source: WeightSource, index: int, announce: Step
    ) -> None:
        """Send one bucket while the replica receives it; a carrier that writes it first announces it afterwards."""
        await announce()
        await channel.send(source.manifest, index, source.bucket(index))

    # The trainer's end.

    @override
    async def start(self) -> None:
        if not self._listening:  # one that stages a version listens already, and holds the lock
            async with self._lock:
                if not self._listening:
                    self.endpoint = await self.listen()
                    self._listening = True

    @override
    def reaches(self, peer: Peer) -> bool:
        return self.config.carrier in peer.carriers

    async def prepare(self, source: WeightSource) -> None:
        """Stage a version, once. Raises MeshError."""
        await self.start()
        version = source.manifest.version
        if version in self._staged:
            return  # also while a newer one is gathered, and staged meanwhile
        async with self._lock:
            if version not in self._staged:
                await self.stage(source)
                self._staged.append(version)

    @override
    async def send(self, source: WeightSource, receivers: Sequence[Receiver]) -> Sequence[Delivery]:
        await self.prepare(source)
        return [Delivery(self, source, receiver) for receiver in receivers]

    def give_up_channel(self, generation: int) -> None:
        """End a replica's own channel; idempotent, never waits."""
        if (channel := self.channels.pop(generation, None)) is not None:
            channel.abort()

    @override
    def leave(self, receiver: Receiver) -> None:
        self.give_up_channel(receiver.link.generation)

    # The replica's end.

    @override
    async def receive(self, plan: ReceivePlan) -> None:
        if plan.carrier not in self.names:
            offers = ", ".join(self.names)
            raise ConflictError(f"carrier {plan.carrier!r}: this process offers {offers}")
        try:
            channel = await self._open(plan)
        except UnavailableError as error:
            if not plan.link.group:
                raise
            await plan.arrival.refuse(plan.link.group, error)
        else:
            await plan.arrival.begin(channel, plan.link.group)

    async def _open(self, plan: ReceivePlan) -> Channel:
        """Open this end of the channel that the coordinator chose."""
        if self._end is not None:
            link, channel = self._end
            if link.group == plan.link.group:
                return channel
            self._end = None
            channel.abort()
        channel = self.channel(plan.link)
        self._end = plan.link, channel
        try:
            await plan.arrival.unless_replaced(channel.open(self.config.ready_s))
        except UserError as error:
            if self.refused is None:
                raise
            self.refused(error)
            raise UnavailableError(str(error)) from error
        return channel

    @override
    def committed(self, version: Version) -> None:
        if self._end is not None:
            self._end[1].committed(version)

    @override
    async def disconnect(self) -> None:
        if self._end is not None:
            (_, channel), self._end = self._end, None
            await channel.close()


class Way:
    """The trainer's end of a channel, for one replica: its own channel."""

    tries = 1 + _RESENDS
    """How often what arrived corrupted is sent."""

    def __init__(self, pairs: Pairs, link: Link) -> None:
        self.pairs = pairs
        self.link = link

    def describe(self, proposal: pb.PlanePropose) -> None:
        """Say which channel it is, unless that is the replica's own."""

    async def open(self, ready: Step) -> None:
        """Open this end, the first time, while the replica opens its own, until it is ready."""
        known = self.pairs.channels.get(self.link.generation)
        if known is not None:
            await ready()
            return
        channel = self.pairs.channel(replace(self.link, endpoint=self.pairs.endpoint))
        self.pairs.channels[self.link.generation] = channel
        await together(channel.open(self.pairs.config.ready_s), ready())

    async def while_open(self, work: Awaitable[_T]) -> _T:
        """The result of `work`. Raises GroupError as soon as a group has failed."""
        return await work

    async def plan(self, missing: Sequence[int]) -> Sequence[int]:
        """The buckets that go by this channel, of which the replica lacks some. Raises GroupError."""
        return missing

    async def send(self, source: WeightSource, index: int, announce: Step) -> None:
        """One bucket, which is there; `announce` has the replica take it. Raises GroupError."""
        channel = self.pairs.channels[self.link.generation]
        await self.pairs.hand_over(channel, source, index, announce)


class Delivery:
    """A version on its way to one replica by its own channel."""

    def __init__(self, pairs: Pairs, source: WeightSource, receiver: Receiver) -> None:
        self.source = source
        self.carrier = pairs.config.carrier
        self.moved_bytes = 0
        self._pairs = pairs
        self._receiver = receiver
        self._name = receiver.peer.name
        self._generation = receiver.link.generation
        self._way = Way(pairs, receiver.link)
        self._group = 0
        self._planned = False
        """Whether the version was proposed before it was gathered, so that each TRANSFER has to say the hashes."""
        self._on_device = False
        """Whether it arrives on a device, so that each TRANSFER has to say the chunk digest."""
        self._missing: Sequence[int] = ()
        """Buckets that the replica has not acknowledged."""

    async def propose(self) -> None:
        """PROPOSE … READY."""
        await self._propose(Way(self._pairs, self._receiver.link))

    async def transfer(self) -> None:
        """TRANSFER … RECEIVED of the last bucket, with the right hash."""
        way = self._way
        for _ in range(way.tries):
            await self._send_missing(way)
            if not self._missing:
                return
        what = f"buckets {list(self._missing)} of weights {self.source.manifest.version}"
        problem = f"{self._name}: {what} arrived corrupted, again and again"
        raise GroupError(problem) if self._group else CorruptError(problem)

    def skip(self) -> None:
        """Stop sending."""

    def committed(self) -> None:
        """Note that the replica's engine serves it."""
        if (channel := self._pairs.channels.get(self._generation)) is not None:
            channel.committed(self.source.manifest.version)

    async def _propose(self, way: Way) -> None:
        """Open both ends of the channel; the replica says what it holds."""
        manifest = self.source.manifest
        proposal = pb.PlanePropose(
            manifest=manifest_to_message(manifest),
            endpoint=self._pairs.endpoint,
            carrier=self.carrier,
        )
        way.describe(proposal)
        self._way, self._group, self._planned = way, proposal.group, not manifest.bucket_hashes
        await self._receiver.propose(manifest.version, proposal)
        opening = way.open(self._ready)
        await self._progressing(opening, self._pairs.config.ready_s, "READY")

    async def _ready(self) -> None:
        ready = (await self._receiver.hear("ready")).ready
        if ready.error:
            raise GroupError(ready.error)
        self._on_device = ready.chunk_digests
        every, held = range(len(self.source.manifest.bucket_bytes)), set(ready.held)
        self._missing = [index for index in every if index not in held]

    async def _send_missing(self, way: Way) -> None:
        """Send each once; then those are missing that arrived corrupted."""
        source = self.source
        version, lacking = source.manifest.version, set(self._missing)
        wanted = await way.plan(self._missing)
        corrupted: list[int] = []

        async def send() -> None:
            for index in wanted:
                known, of_tensors = await gathered(source, index)
                transfer = pb.PlaneTransfer(buckets=[index])
                if self._on_device:
                    transfer.chunk_digests.append(await chunk_digest(source, index))
                if self._planned:
                    transfer.hashes.append(known)
                    transfer.tensor_hashes.extend(of_tensors)

                async def announce(transfer: pb.PlaneTransfer = transfer) -> None:
                    await self._receiver.say(version, transfer=transfer)

                await way.send(source, index, announce)

        async def acknowledge() -> None:
            for place, index in enumerate(wanted):
                # No deadline counts the gather.
                expected, _ = await way.while_open(gathered(source, index))
                if self._on_device:
                    expected = await chunk_digest(source, index)
                received = await self._received(source.manifest.bucket_bytes[index])
                if received.bucket != index:
                    raise InfraError(
                        f"{self._name}: acknowledged bucket {received.bucket}, not {index}"
                    )
                self.moved_bytes += received.moved_bytes
                if received.hash != expected and index in lacking:
                    corrupted.append(index)
                self._missing = [*corrupted, *(i for i in wanted[place + 1 :] if i in lacking)]

        await together(send(), acknowledge())
        if not wanted or (self._group and not corrupted):
            await self._receiver.say(version, transfer=pb.PlaneTransfer())  # that was all
        for index in corrupted:
            check_source(index, source, *await gathered(source, index))

    async def _received(self, nbytes: int) -> pb.ReplicaReceived:
        """The next RECEIVED."""
        deadline_s = self._pairs.config.deadline_s(nbytes)
        message = self._receiver.hear("received")
        received = (await self._progressing(message, deadline_s, "RECEIVED")).received
        if received.error:
            raise GroupError(received.error)
        return received

    async def _progressing(self, work: Awaitable[_T], deadline_s: float, what: str) -> _T:
        return await self._receiver.progressing(work, deadline_s, what)


class WholeVersions(Pairs):
    """A carrier of 0.2 that is no transport itself: it is given versions that are gathered. It goes in 0.3."""

    def __init__(self, config: WeightsConfig, carrier: Carrier) -> None:
        super().__init__(config)
        self._carrier = carrier
        self.listen, self.channel = carrier.listen, carrier.channel  # type: ignore[method-assign]
        self._writes = plugins.constant(CARRIERS, config.carrier, "WRITES", False)

    @override
    async def stage(self, source: WeightSource) -> None:
        await whole(source)
        await self._carrier.stage(source)

    @override
    async def hand_over(
        self, channel: Channel, source: WeightSource, index: int, announce: Step
    ) -> None:
        if not self._writes:
            await super().hand_over(channel, source, index, announce)
            return
        await channel.send(source.manifest, index, source.bucket(index))
        await announce()

    @override
    async def close(self) -> None:
        await self._carrier.close()


LoadCarrier: TypeAlias = Callable[[WeightsConfig, RunPaths], Pairs]
"""Makes the carrier that a configuration names."""


def load_transport(config: WeightsConfig, paths: RunPaths) -> Transport:
    """The way for weights that the configuration names. Raises ConfigError for an unknown one."""
    kind = plugins.load(CARRIERS, config.carrier, "Carrier")
    made = kind(config, paths)
    return made if hasattr(kind, "send") else WholeVersions(config, made)


def load_carrier(config: WeightsConfig, paths: RunPaths) -> Pairs:
    """The same, of a carrier that makes channels."""
    transport = load_transport(config, paths)
    assert isinstance(transport, Pairs), f"{config.carrier} is not a single carrier"
    return transport
