"""The coordinator's side of one replica: the messages that bring a version to it, and its state."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Sequence
from dataclasses import replace
from typing import TypeVar

from meshrl.config.weights import WeightsConfig
from meshrl.contract.errors import (
    CorruptError,
    InfraError,
    WaitTimeoutError,
    from_detail,
)
from meshrl.contract.ports import WeightSource
from meshrl.contract.types import Version
from meshrl.v1 import weights_pb2 as pb
from meshrl.weights.carrier import Channel, Link
from meshrl.weights.fleet import ReplicaReport, ReplicaState, ReplicaView, decode_report
from meshrl.weights.gathering import SourceError, chunk_digest, gathered
from meshrl.weights.groups import Assembly, GroupError, Member
from meshrl.weights.messages import (
    ReplicaStream,
    digest,
    manifest_to_message,
    stamp,
    stamped_version,
    wrong_tensors,
)
from meshrl.weights.routes import Peer, Route, Routes
from meshrl.weights.waiting import together, within

logger = logging.getLogger(__name__)
_T = TypeVar("_T")
_RESENDS = 2
"""How often a bucket that arrives corrupted is sent again: a third time is no accident of the network."""


class Replica:
    """One joining of one rollout process. Every wait below has a progress deadline; none affects another replica."""

    def __init__(
        self,
        hello: pb.ReplicaMessage,
        *,
        version: Version | None,
        stream: ReplicaStream,
        link: Link,
        peer: Peer,
        routes: Routes,
        config: WeightsConfig,
    ) -> None:
        self.name = hello.hello.replica
        self.generation = link.generation
        self.peer = peer
        self.version = version
        self.stream = stream
        self.state = ReplicaState.JOINING
        self.suspect = False
        self.reason = ""
        self.last_sync_s = 0.0
        self.pause_s = 0.0
        self.moved_bytes = 0
        self.report: ReplicaReport | None = None
        """Its last report."""
        self._clock = asyncio.get_running_loop().time
        self._run = hello.stamp.run
        self._commit_s = max(hello.hello.commit_deadline_s, config.commit_s)
        self._link = link
        self._routes = routes
        self._config = config
        self._channels: dict[str, Channel] = {}
        """To this replica alone, by carrier; open, except the one that `_propose` is opening."""
        self._member: Member | None = None
        """In the group that it is in; kept from version to version."""
        self._assembly: tuple[Version, Assembly] | None = None
        """Of which version it is a member that can be in a group."""
        self._group = 0
        """Number of the channel that is used; 0 is its own."""
        self._proposed: Version | None = None
        self._planned = False
        """Whether the version was proposed before it was gathered, so that each TRANSFER has to say the hashes."""
        self._on_device = False
        """Whether it receives on a device, so that each TRANSFER has to say the chunk digest."""
        self._missing: Sequence[int] = ()
        """Buckets of the version in transfer that it has not acknowledged."""
        self._route: Route | None = None
        """Of the last version, or of the one in transfer."""
        self._moving_bytes = 0
        """What has travelled of the version in transfer."""
        self._served_bytes = 0
        """Of the last version that was prepared."""

    @property
    def view(self) -> ReplicaView:
        """What the RPC `Fleet` shows."""
        late = self.suspect and self.state is not ReplicaState.OUT
        return ReplicaView(
            name=self.name,
            state=ReplicaState.SUSPECT if late else self.state,
            generation=self.generation,
            version=self.version,
            last_sync_s=self.last_sync_s,
            pause_s=self.pause_s,
            reason=self.reason,
            carrier=self._route.carrier if self._route else "",
            moved_bytes=self.moved_bytes,
            report=None if self.state is ReplicaState.OUT else self.report,
        )

    async def propose(self, source: WeightSource) -> None:
        """PROPOSE … READY: the replica has the manifest, and both ends of the channel are open.

        Another version may be proposed next: the replica forgets this one.

        Raises:
            MeshError: the replica failed or hung.
        """
        self._began = self._clock()
        self._moving_bytes = 0
        self._route = await self._routes.choose(self.peer, source)
        await self._choose_channel(source.manifest.version)
        await self._propose_by_channel(source)

    async def prepare(self, source: WeightSource) -> None:
        """TRANSFER … PREPARED of what was proposed: the replica holds it, verified; its engine is untouched.

        Raises:
            SourceError: the source's bytes are not what its manifest says.
            MeshError: the replica failed, hung or received corrupted bytes too often.
        """
        await self._send_version(source)
        manifest = source.manifest
        served = manifest.served
        self._served_bytes = served.total_bytes
        prepared = await self._expect("prepared", self._config.deadline_s(served.total_bytes))
        # An engine that serves adapters holds what was sent; another one what that is merged into.
        if tuple(prepared.prepared.hashes) not in (served.bucket_hashes, manifest.bucket_hashes):
            raise CorruptError(f"{self.name}: staged bytes of weights {manifest.version} differ")
        if self.state is ReplicaState.JOINING:
            self.state = ReplicaState.SYNCED

    async def commit(self, version: Version) -> None:
        """COMMIT … COMMITTED: the engine serves the version."""
        await self._send(version, commit=pb.PlaneCommit())
        deadline_s = self._commit_s + self._config.switch_s(self._served_bytes)
        committed = await self._expect("committed", deadline_s)
        self.version = version
        for channel in self._channels.values():
            channel.committed(version)
        self.state = ReplicaState.SERVING
        self.pause_s = committed.committed.pause_s
        self.last_sync_s = self._clock() - self._began
        self.moved_bytes = self._moving_bytes

    def assemble(self, version: Version, assembly: Assembly) -> None:
        """It is a member of this version, and can be in a group."""
        self._assembly = version, assembly

    def skip(self) -> None:
        """Nothing is sent to it of what was proposed."""
        self._leave_assembly()
        self._end_membership()

    async def drop(self, version: Version, reason: str) -> None:
        """Withdraw the prepared version; the replica stays in the fleet."""
        await self._send(version, abort=pb.PlaneAbort(code="corrupt", message=reason))

    def give_up(self, reason: str) -> None:
        """Mark the replica as out, and abort what is still being sent to it."""
        self.state, self.suspect, self.reason = ReplicaState.OUT, False, reason
        self._leave_assembly()
        for channel in self._channels.values():
            channel.abort()

    def inspect(self, message: pb.ReplicaMessage) -> bool:
        """Raise the failure that the replica tells of, whatever this side waits for; keep what it says of itself."""
        if message.WhichOneof("body") == "report":
            self.report = decode_report(message.report)
            return True
        if message.WhichOneof("body") == "failed":
            raise from_detail(message.failed.code, f"{self.name}: {message.failed.message}", {})
        return False

    def _leave_assembly(self) -> None:
        if self._assembly is not None:
            self._assembly[1].leave(self.generation)

    async def _propose_by_channel(self, source: WeightSource) -> None:
        """Propose by the group's channel while there is one to be in, else by this replica's own."""
        while (member := self._member) is not None:
            try:
                await self._propose(source, member)
            except GroupError as error:
                await self._leave_group(source.manifest.version, error)
            else:
                return
        await self._propose(source)

    async def _choose_channel(self, version: Version) -> None:
        """`_member` is this replica in the group that brings the version; None: its own channel does."""
        if self._assembly is not None and self._assembly[0] == version:
            await self._join_group(version)
        else:
            self._end_membership()

    async def _join_group(self, version: Version) -> None:
        """Be in the group of this version, if there is one to be in: `_member` says it."""
        if self._assembly is None or self._assembly[0] != version:
            return
        assembly = self._assembly[1]
        if not assembly.expects(self.generation):
            return
        group = await assembly.join(self.generation)
        if group is None:
            assembly.done(self.generation)
            self._member = None
        else:
            self._member = Member(group, assembly, self.generation)

    async def _leave_group(self, version: Version, error: GroupError) -> None:
        """From now on the next group brings the version, or this replica's own channel."""
        logger.info("%s gets weights %s otherwise: %s", self.name, version, error)
        self._end_membership()
        await self._join_group(version)

    def _end_membership(self) -> None:
        if self._member is not None:
            self._member.leave()
            self._member = None

    async def _send_version(self, source: WeightSource) -> None:
        """TRANSFER … RECEIVED of the last bucket, with the right hash."""
        while True:
            member = self._member
            try:
                await self._send_missing(source, member)
                break
            except GroupError as error:
                await self._leave_group(source.manifest.version, error)
                await self._propose_by_channel(source)
        if member is not None:
            member.done()

    async def _send_missing(self, source: WeightSource, member: Member | None) -> None:
        """Until every bucket has arrived with the right hash; a group sends each once."""
        for _ in range(1 if member else 1 + _RESENDS):
            await self._transfer(source, member)
            if not self._missing:
                return
        what = f"buckets {list(self._missing)} of weights {source.manifest.version}"
        problem = f"{self.name}: {what} arrived corrupted, again and again"
        raise GroupError(problem) if member else CorruptError(problem)

    async def _propose(self, source: WeightSource, member: Member | None = None) -> None:
        """Open both ends of the group's channel, or of this replica's own; the replica says what it holds."""
        manifest, route = source.manifest, self._route
        assert route is not None
        message = pb.PlanePropose(
            manifest=manifest_to_message(manifest),
            endpoint=route.endpoint,
            carrier=route.carrier,
        )
        opens_own = member is None and route.carrier not in self._channels
        if member is not None:
            group = member.group
            message.group, message.size = group.number, group.size
            message.rank = group.rank(self.generation)
            if (alone := self._channels.pop(route.carrier, None)) is not None:
                alone.abort()  # before it was a member
            group.open(self._config.ready_s)
        self._group, self._planned = message.group, not manifest.bucket_hashes
        self._proposed = manifest.version
        await self._send(manifest.version, propose=message)
        opening = self._ready(source)
        if opens_own:
            channel = self._routes.channel(route, replace(self._link, endpoint=route.endpoint))
            self._channels[route.carrier] = channel
            opening = together(channel.open(self._config.ready_s), opening)
        await self._progressing(opening, self._config.ready_s, "READY", member)

    async def _ready(self, source: WeightSource) -> None:
        ready = (await self._receive("ready")).ready
        if ready.error:
            raise GroupError(ready.error)
        self._on_device = ready.chunk_digests
        every, held = range(len(source.manifest.bucket_bytes)), set(ready.held)
        self._missing = [index for index in every if index not in held]

    async def _transfer(self, source: WeightSource, member: Member | None) -> None:
        """Send the missing buckets; then those are missing that arrived corrupted."""
        manifest, wanted, route = source.manifest, self._missing, self._route
        version, planned, on_device = manifest.version, self._planned, self._on_device
        assert route is not None
        own = None if member else self._channels[route.carrier]
        writes = own is not None and self._routes.writes(route)
        one_by_one = member is not None or planned or writes or on_device
        lacking = set(wanted)
        if member is not None:
            wanted = await member.plan(wanted)
        corrupted: list[int] = []

        async def send_bucket(index: int) -> None:
            if member is not None:
                await member.send(source, index)
            elif own is not None:
                await own.send(manifest, index, source.bucket(index))

        async def send() -> None:
            for index in wanted:
                digest, tensors = await gathered(source, index)
                if writes:
                    await send_bucket(index)
                if one_by_one:
                    transfer = pb.PlaneTransfer(buckets=[index])
                    if on_device:
                        transfer.chunk_digests.append(await chunk_digest(source, index))
                    if planned:
                        transfer.hashes.append(digest)
                        transfer.tensor_hashes.extend(tensors)
                    await self._send(version, transfer=transfer)
                if not writes:
                    await send_bucket(index)

        async def acknowledge() -> None:
            for place, index in enumerate(wanted):
                expected = await self._gathered(source, index, member)
                if on_device:
                    expected = await chunk_digest(source, index)
                received = await self._received(manifest.bucket_bytes[index], member)
                if received.bucket != index:
                    raise InfraError(
                        f"{self.name}: acknowledged bucket {received.bucket}, not {index}"
                    )
                self._moving_bytes += received.moved_bytes
                if received.hash != expected and index in lacking:
                    corrupted.append(index)
                self._missing = [*corrupted, *(i for i in wanted[place + 1 :] if i in lacking)]

        if not one_by_one or not wanted:
            await self._send(version, transfer=pb.PlaneTransfer(buckets=wanted))
        await together(send(), acknowledge())
        if member is not None and wanted and not corrupted:
            await self._send(version, transfer=pb.PlaneTransfer())  # that was all
        for index in corrupted:
            _check_source(index, source, *await gathered(source, index))

    async def _gathered(self, source: WeightSource, index: int, member: Member | None) -> str:
        """The hash of a bucket, once it is there: no deadline counts that. Raises GroupError."""
        coming = gathered(source, index)
        expected, _ = await (member.while_in(coming) if member else coming)
        return expected

    async def _received(self, nbytes: int, member: Member | None) -> pb.ReplicaReceived:
        """The next RECEIVED."""
        deadline_s = self._config.deadline_s(nbytes)
        message = self._receive("received")
        received = (await self._progressing(message, deadline_s, "RECEIVED", member)).received
        if received.error:
            raise GroupError(received.error)
        return received

    async def _progressing(
        self,
        work: Awaitable[_T],
        deadline_s: float,
        what: str,
        member: Member | None,
    ) -> _T:
        """The result of `work` within the deadline.

        Raises:
            GroupError: another member may be the cause that nothing came.
            WaitTimeoutError: nothing came, by this replica's fault.
        """
        waiting = within(work, deadline_s, f"{self.name}: {what}", self._mark_suspect)
        try:
            result = await (member.while_in(waiting) if member else waiting)
        except WaitTimeoutError as error:
            if member is None or self.stream.quiet_s > deadline_s / 2:
                raise
            raise GroupError(str(error)) from error
        except GroupError as error:
            if self.stream.quiet_s > deadline_s / 2:
                raise WaitTimeoutError(f"{self.name}: {what}: silent in a group") from error
            raise
        self.suspect = False
        return result

    async def _expect(self, kind: str, deadline_s: float) -> pb.ReplicaMessage:
        return await self._progressing(self._receive(kind), deadline_s, kind.upper(), None)

    async def _receive(self, kind: str) -> pb.ReplicaMessage:
        while True:
            message = await self.stream.receive()
            body = message.WhichOneof("body")
            if body not in ("ready", "received", "prepared"):
                break
            # Neither of a version that was withdrawn, nor of a group that was left.
            of_version = stamped_version(message.stamp) == self._proposed
            if of_version and getattr(getattr(message, body), "group", self._group) == self._group:
                break
        if body != kind:
            raise InfraError(f"{self.name}: sent {body}, not {kind}")
        return message

    async def _send(self, version: Version, **body: object) -> None:
        about = stamp(self._run, self.generation, version)
        await self.stream.send(pb.PlaneMessage(stamp=about, **body))  # type: ignore[arg-type]

    def _mark_suspect(self) -> None:
        self.suspect = True


def _check_source(
    index: int, source: WeightSource, expected: str, tensor_hashes: Sequence[int]
) -> None:
    """Before a bucket is sent again: raises SourceError when the source itself is wrong."""
    manifest, actual = source.manifest, digest(source.bucket(index))
    if actual != expected:
        wrong = wrong_tensors(manifest, index, source.bucket(index), tensor_hashes)
        raise SourceError(
            f"bucket {index} of weights {manifest.version} has hash {actual}, its manifest says "
            f"{expected}: the trainer's memory changed after the version was made ({wrong})"
        )
