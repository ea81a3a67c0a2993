"""The coordinator's side of one replica: the messages that bring a version to it, and its state."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TypeVar

from meshrl.config.weights import WeightsConfig
from meshrl.contract.errors import (
    CorruptError,
    InfraError,
    MeshError,
    WaitTimeoutError,
    from_detail,
)
from meshrl.contract.ports import WeightSource
from meshrl.contract.types import Version
from meshrl.v1 import weights_pb2 as pb
from meshrl.weights.carrier import Channel, Link
from meshrl.weights.fleet import ReplicaReport, ReplicaState, ReplicaView, decode_report
from meshrl.weights.gathering import SourceError, chunk_digest, gathered
from meshrl.weights.groups import Assembly, FromGroup
from meshrl.weights.messages import (
    ReplicaStream,
    digest,
    manifest_to_message,
    stamp,
    stamped_version,
    wrong_tensors,
)
from meshrl.weights.routes import Peer, Route, Routes
from meshrl.weights.senders import FromReplica, FromTrainer, Progress, RelayError
from meshrl.weights.waiting import together, within

logger = logging.getLogger(__name__)
_T = TypeVar("_T")
_MOST_FAILED = 2
"""Replicas that could not send to this one, though they live: after so many the trainer always does."""


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
        """From the trainer, by carrier; open, except the one that `_propose` is opening."""
        self.progress = Progress()
        self._hops = itertools.count(1)
        self._sender: FromReplica | FromGroup | None = None
        """The replica that sends to this one, or the group that it is in; kept from version to version."""
        self._assembly: tuple[Version, Assembly] | None = None
        """Of which version it is a member that can be in a group."""
        self._hop = 0
        """Of the channel that is used."""
        self._proposed: Version | None = None
        self._shunned: set[int] = set()
        """Generations of replicas that lived and did not send."""
        self._planned = False
        """Whether the version was proposed before it was gathered, so that each TRANSFER has to say the hashes."""
        self._on_device = False
        """Whether it receives on a device, so that each TRANSFER has to say the chunk digest."""
        self._missing: Sequence[int] = ()
        """Buckets of the version in transfer that it has not acknowledged."""
        self._route: Route | None = None
        """Of the last version, or of the one in transfer."""
        self._moving = False
        """Between PROPOSE and the last RECEIVED: the carrier may be the cause of a failure now."""
        self._moving_bytes = 0
        """What has travelled of the version in transfer."""
        self._served_bytes = 0
        """Of the last version that was prepared."""
        self._opening_s = 0.0
        """From PROPOSE to READY, of the last version."""
        self._gathering_s = 0.0
        """What it waited for buckets of the version in transfer to be gathered, with nothing else to do."""

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

    async def propose(self, source: WeightSource, before: Replica | None = None) -> None:
        """PROPOSE … READY: the replica has the manifest, and both ends of the channel are open.

        Another version may be proposed next: the replica forgets this one.

        Args:
            source: the version.
            before: takes the same version, and may send it on to this one.

        Raises:
            MeshError: the replica failed or hung.
        """
        self._began = self._clock()
        version = source.manifest.version
        self.progress.begin(version)
        self._moving_bytes = 0
        self._route = await self._routes.choose(self.peer, source)
        proposed_at = self._clock()
        with self._carrying():
            await self._choose_sender(source, before)
            await self._propose_by_sender(source)
        self._opening_s = self._clock() - proposed_at

    async def prepare(self, source: WeightSource) -> None:
        """TRANSFER … PREPARED of what was proposed: the replica holds it, verified; its engine is untouched.

        Raises:
            SourceError: the source's bytes are not what its manifest says.
            MeshError: the replica failed, hung or received corrupted bytes too often.
        """
        with self._carrying():
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
        self.progress.end()
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

    async def skip(self, version: Version) -> None:
        """Nothing is sent to it of what was proposed."""
        self.progress.end()
        self._leave_assembly()
        if isinstance(self._sender, FromGroup):
            await self._sender.close(version)
            self._sender = None

    async def drop(self, version: Version, reason: str) -> None:
        """Withdraw the prepared version; the replica stays in the fleet."""
        self.progress.end()
        await self._send(version, abort=pb.PlaneAbort(code="corrupt", message=reason))

    def give_up(self, reason: str) -> None:
        """Mark the replica as out, and abort what is still being sent to it."""
        self.state, self.suspect, self.reason = ReplicaState.OUT, False, reason
        self.progress.leave()
        self._leave_assembly()
        for channel in self._channels.values():
            channel.abort()

    async def release(self) -> None:
        """It is out: the one before it need keep nothing for it."""
        if self._sender is not None and self.progress.version is not None:
            with suppress(RelayError):
                await self._sender.close(self.progress.version)
            self._sender = None

    def inspect(self, message: pb.ReplicaMessage) -> bool:
        """Raise the failure that the replica tells of, whatever this side waits for; keep what it says of itself."""
        if message.WhichOneof("body") == "report":
            self.report = decode_report(message.report)
            return True
        if message.WhichOneof("body") == "failed":
            self._report_route_failure()
            raise from_detail(message.failed.code, f"{self.name}: {message.failed.message}", {})
        return False

    @contextmanager
    def _carrying(self) -> Iterator[None]:
        """What fails in this context may be the carrier's fault."""
        self._moving = True
        try:
            yield
        except SourceError:
            raise
        except MeshError:
            self._report_route_failure()
            raise
        finally:
            self._moving = False

    def _leave_assembly(self) -> None:
        if self._assembly is not None:
            self._assembly[1].leave(self.generation)

    async def _propose_by_sender(self, source: WeightSource) -> None:
        """Propose with the sender that was chosen, or with what follows when that cannot; at last the trainer."""
        version = source.manifest.version
        while (sender := self._sender) is not None:
            try:
                await sender.open(version)
                await self._propose(source, sender)
            except RelayError as error:
                await self._leave_sender(version, error)
            else:
                return
        await self._propose(source)

    async def _join_group(self, version: Version) -> None:
        """Be in the group of this version, if there is one to be in: `_sender` is it."""
        if self._assembly is None or self._assembly[0] != version:
            return
        assembly = self._assembly[1]
        if not assembly.expects(self.generation):
            return
        group = await assembly.join(self.generation)
        if group is None:
            assembly.done(self.generation)
            self._sender = None
        elif not isinstance(self._sender, FromGroup) or self._sender.group is not group:
            self._sender = FromGroup(group, assembly, self.generation, next(self._hops))
        else:
            self._sender = FromGroup(group, assembly, self.generation, self._sender.hop)

    async def _choose_sender(self, source: WeightSource, before: Replica | None) -> None:
        """`_sender` is the replica that sends, or the group; None: the trainer does, to this one alone."""
        version, route = source.manifest.version, self._route
        assert route is not None
        if self._assembly is not None and self._assembly[0] == version:
            if isinstance(self._sender, FromReplica):
                with suppress(RelayError):
                    await self._sender.close(version)
                self._sender = None
            await self._join_group(version)
            return
        if isinstance(self._sender, FromGroup):
            await self._sender.close(version)
            self._sender = None
        chosen: Replica | None = None
        if before is not None and len(self._shunned) < _MOST_FAILED:
            chosen = before if self._routes.relays(route, self.peer, before.peer) else None
        sender = self._sender
        if sender is not None and (
            chosen is None
            or sender.generation != chosen.generation
            or sender.carrier != route.carrier
        ):
            self._sender = None
            with suppress(RelayError):
                await sender.close(version)
        if chosen is not None and self._sender is None:
            link = replace(self._link, endpoint=route.endpoint, hop=next(self._hops))
            self._sender = FromReplica(
                *(chosen.generation, chosen.progress, chosen.relay, link), carrier=route.carrier
            )

    async def relay(self, version: Version, order: pb.PlaneRelay) -> None:
        """Have this replica send to another one. Raises MeshError."""
        await self._send(version, relay=order)

    def shuns(self, other: Replica) -> bool:
        """Whether `other` has failed to send to this one."""
        return other.generation in self._shunned

    async def _leave_sender(self, version: Version, error: RelayError) -> None:
        """From now on the trainer sends, or the next group."""
        assert self._sender is not None
        sender, self._sender = self._sender, None
        if isinstance(sender, FromReplica) and not sender.is_out:
            self._shunned.add(sender.generation)
        logger.info("%s gets weights %s otherwise: %s", self.name, version, error)
        with suppress(RelayError):
            await sender.close(version)
        await self._join_group(version)

    async def _send_version(self, source: WeightSource) -> None:
        """TRANSFER … RECEIVED of the last bucket, with the right hash."""
        version, route = source.manifest.version, self._route
        assert route is not None
        began, self._gathering_s = self._clock(), 0.0
        while (sender := self._sender) is not None:
            try:
                await self._send_missing(sender, source)
            except RelayError as error:
                await self._leave_sender(version, error)
                await self._propose_by_sender(source)
            else:
                with suppress(RelayError):
                    await sender.done(version)
                break
        if self._sender is None:
            await self._send_missing(FromTrainer(self._channels[route.carrier]), source)
        seconds = self._clock() - began - self._gathering_s
        self._routes.observe(route, version, seconds, self._opening_s)

    async def _send_missing(
        self, sender: FromTrainer | FromReplica | FromGroup, source: WeightSource
    ) -> None:
        """Until every bucket has arrived with the right hash; a group sends each once."""
        for _ in range(1 if isinstance(sender, FromGroup) else 1 + self._config.resends):
            await self._transfer(sender, source)
            if not self._missing:
                return
        what = f"buckets {list(self._missing)} of weights {source.manifest.version}"
        problem = f"{self.name}: {what} arrived corrupted, again and again"
        raise RelayError(problem) if sender.hop else CorruptError(problem)

    async def _propose(
        self, source: WeightSource, sender: FromReplica | FromGroup | None = None
    ) -> None:
        """Open both ends of the channel from `sender`, or else from the trainer; the replica says what it holds."""
        manifest, route = source.manifest, self._route
        assert route is not None
        message = pb.PlanePropose(
            manifest=manifest_to_message(manifest),
            endpoint=route.endpoint,
            carrier=route.carrier,
            hop=sender.hop if sender else 0,
        )
        self._hop, self._planned = message.hop, not manifest.bucket_hashes
        self._proposed = manifest.version
        if isinstance(sender, FromGroup):
            group = sender.group
            message.group, message.size = group.number, group.size
            message.rank = group.rank(self.generation)
            if (alone := self._channels.pop(route.carrier, None)) is not None:
                alone.abort()  # before it was a member
            group.open(self._config.ready_s)
        await self._send(manifest.version, propose=message)
        opening = self._ready(source)
        if sender is None and route.carrier not in self._channels:
            channel = self._routes.channel(route, replace(self._link, endpoint=route.endpoint))
            self._channels[route.carrier] = channel
            opening = together(channel.open(self._config.ready_s), opening)
        await self._progressing(opening, self._config.ready_s, "READY", sender)

    async def _ready(self, source: WeightSource) -> None:
        ready = (await self._receive("ready")).ready
        if ready.error:
            raise RelayError(ready.error)
        self._on_device = ready.chunk_digests
        every, held = range(len(source.manifest.bucket_bytes)), set(ready.held)
        self._missing = [index for index in every if index not in held]

    async def _transfer(
        self, sender: FromTrainer | FromReplica | FromGroup, source: WeightSource
    ) -> None:
        """Send the missing buckets; then those are missing that arrived corrupted."""
        manifest, wanted, route = source.manifest, self._missing, self._route
        version, planned, on_device = manifest.version, self._planned, self._on_device
        assert route is not None
        writes = isinstance(sender, FromTrainer) and self._routes.writes(route)
        one_by_one = sender.hop or planned or writes or on_device
        lacking = set(wanted)
        if isinstance(sender, FromGroup):
            wanted = await sender.plan(wanted)
        corrupted: list[int] = []

        async def send() -> None:
            for index in wanted:
                await sender.until_held(version, index)
                digest, tensors = await gathered(source, index)
                if writes:
                    await sender.send(source, index)
                if one_by_one:
                    transfer = pb.PlaneTransfer(buckets=[index])
                    if on_device:
                        transfer.chunk_digests.append(await chunk_digest(source, index))
                    if planned:
                        transfer.hashes.append(digest)
                        transfer.tensor_hashes.extend(tensors)
                    await self._send(version, transfer=transfer)
                if not writes:
                    await sender.send(source, index)

        async def acknowledge() -> None:
            for place, index in enumerate(wanted):
                expected = await self._gathered(source, index, sender)
                await sender.until_held(version, index)
                if on_device:
                    expected = await chunk_digest(source, index)
                received = await self._received(manifest.bucket_bytes[index], sender)
                if received.bucket != index:
                    raise InfraError(
                        f"{self.name}: acknowledged bucket {received.bucket}, not {index}"
                    )
                self._moving_bytes += received.moved_bytes
                if received.hash == expected:
                    self.progress.holds(index)
                elif index in lacking:
                    corrupted.append(index)
                self._missing = [*corrupted, *(i for i in wanted[place + 1 :] if i in lacking)]

        if not one_by_one or not wanted:
            await self._send(version, transfer=pb.PlaneTransfer(buckets=wanted))
        await together(send(), acknowledge())
        if isinstance(sender, FromGroup) and wanted and not corrupted:
            await self._send(version, transfer=pb.PlaneTransfer())  # that was all
        for index in corrupted if not isinstance(sender, FromReplica) else ():
            _check_source(index, source, *await gathered(source, index))

    async def _gathered(
        self, source: WeightSource, index: int, sender: FromTrainer | FromReplica | FromGroup
    ) -> str:
        """The hash of a bucket, once it is there: no deadline counts that. Raises RelayError."""
        began = self._clock()
        coming = gathered(source, index)
        alone = isinstance(sender, FromTrainer)
        expected, _ = await (coming if alone else sender.while_in(coming))  # type: ignore[union-attr]
        self._gathering_s += self._clock() - began
        return expected

    async def _received(
        self, nbytes: int, sender: FromTrainer | FromReplica | FromGroup
    ) -> pb.ReplicaReceived:
        """The next RECEIVED of what `sender` sends."""
        relay = None if isinstance(sender, FromTrainer) else sender
        deadline_s = self._config.deadline_s(nbytes)
        message = self._receive("received")
        received = (await self._progressing(message, deadline_s, "RECEIVED", relay)).received
        if received.error:
            raise RelayError(received.error)
        return received

    async def _progressing(
        self,
        work: Awaitable[_T],
        deadline_s: float,
        what: str,
        sender: FromReplica | FromGroup | None,
    ) -> _T:
        """The result of `work` within the deadline.

        Raises:
            RelayError: another replica sends, and it may be the cause that nothing came.
            WaitTimeoutError: nothing came, by this replica's fault.
        """
        waiting = within(work, deadline_s, f"{self.name}: {what}", self._mark_suspect)
        try:
            result = await (sender.while_in(waiting) if sender else waiting)
        except WaitTimeoutError as error:
            if sender is None or self.stream.quiet_s > deadline_s / 2:
                raise
            raise RelayError(str(error)) from error
        except RelayError as error:
            if isinstance(sender, FromGroup) and self.stream.quiet_s > deadline_s / 2:
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
            # Neither of a version that was withdrawn, nor of a sender that was left.
            of_version = stamped_version(message.stamp) == self._proposed
            if of_version and getattr(getattr(message, body), "hop", self._hop) == self._hop:
                break
        if body != kind:
            raise InfraError(f"{self.name}: sent {body}, not {kind}")
        return message

    async def _send(self, version: Version, **body: object) -> None:
        about = stamp(self._run, self.generation, version)
        await self.stream.send(pb.PlaneMessage(stamp=about, **body))  # type: ignore[arg-type]

    def _report_route_failure(self) -> None:
        if self._moving and self._route is not None:
            self._moving = False
            self._routes.failed(self._route)

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
