"""The coordinator's side of one replica: the messages that bring a version to it, and its state."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from meshrl.config.weights import WeightsConfig
from meshrl.contract.errors import CorruptError, InfraError, MeshError, from_detail
from meshrl.contract.ports import WeightSource
from meshrl.contract.types import Version, WeightManifest
from meshrl.v1 import weights_pb2 as pb
from meshrl.weights.carrier import Channel, Link
from meshrl.weights.fleet import ReplicaState, ReplicaView
from meshrl.weights.messages import ReplicaStream, digest, manifest_to_message, stamp, wrong_tensors
from meshrl.weights.routes import Peer, Route, Routes
from meshrl.weights.waiting import together, within


class SourceError(CorruptError):
    """The source's own bytes differ from its manifest: the replicas are not the cause."""


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
        self.address = hello.hello.address
        self.generation = link.generation
        self.peer = peer
        self.version = version
        self.stream = stream
        self.state = ReplicaState.JOINING
        self.suspect = False
        self.reason = ""
        self.last_sync_s = 0.0
        self.pause_s = 0.0
        self._clock = asyncio.get_running_loop().time
        self._run = hello.stamp.run
        self._commit_s = max(hello.hello.commit_deadline_s, config.commit_s)
        self._link = link
        self._routes = routes
        self._config = config
        self._channels: dict[str, Channel] = {}
        """By carrier; open, except the one that `_open_channel` is opening."""
        self._route: Route | None = None
        """Of the last version, or of the one in transfer."""
        self._moving = False
        """Between PROPOSE and the last RECEIVED: the carrier may be the cause of a failure now."""
        self._served_bytes = 0
        """Of the last version that was prepared."""
        self._opening_s = 0.0
        """From PROPOSE to READY, of the last version."""

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
            address=self.address,
        )

    async def propose(self, source: WeightSource) -> None:
        """PROPOSE … READY: the replica has the manifest, and both ends of the channel are open.

        Another version may be proposed next: the replica forgets this one.

        Raises:
            MeshError: the replica failed or hung.
        """
        manifest = source.manifest
        self._began = self._clock()
        route = self._route = await self._routes.choose(self.peer, source)
        message = pb.PlanePropose(
            manifest=manifest_to_message(manifest), endpoint=route.endpoint, carrier=route.carrier
        )
        await self._send(manifest.version, propose=message)
        proposed_at = self._clock()
        with self._carrying():
            await within(
                self._open_channel(route),
                self._config.ready_s,
                f"{self.name}: READY",
                self._mark_suspect,
            )
        self._opening_s = self._clock() - proposed_at

    async def prepare(self, source: WeightSource) -> None:
        """TRANSFER … PREPARED of what was proposed: the replica holds it, verified; its engine is untouched.

        Raises:
            SourceError: the source's bytes are not what its manifest says.
            MeshError: the replica failed, hung or received corrupted bytes too often.
        """
        manifest = source.manifest
        with self._carrying():
            await self._send_version(source)
        served = manifest.served
        self._served_bytes = served.total_bytes
        prepared = await self._expect("prepared", self._config.deadline_s(served.total_bytes))
        if tuple(prepared.prepared.hashes) != served.bucket_hashes:
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

    async def drop(self, version: Version, reason: str) -> None:
        """Withdraw the prepared version; the replica stays in the fleet."""
        await self._send(version, abort=pb.PlaneAbort(code="corrupt", message=reason))

    def give_up(self, reason: str) -> None:
        """Mark the replica as out, and abort what is still being sent to it."""
        self.state, self.suspect, self.reason = ReplicaState.OUT, False, reason
        for channel in self._channels.values():
            channel.abort()

    def raise_if_failed(self, message: pb.ReplicaMessage) -> None:
        """Raise the failure that the replica reports, whatever this side waits for."""
        if message.WhichOneof("body") == "failed":
            self._report_route_failure()
            raise from_detail(message.failed.code, f"{self.name}: {message.failed.message}", {})

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

    async def _send_version(self, source: WeightSource) -> None:
        """TRANSFER … RECEIVED of the last bucket, with the right hash."""
        version, route = source.manifest.version, self._route
        assert route is not None
        began = self._clock()
        channel = self._channels[route.carrier]
        wanted: Sequence[int] = range(len(source.manifest.bucket_bytes))
        for _ in range(1 + self._config.resends):
            wanted = await self._transfer(channel, source, wanted)
            if not wanted:
                break
        else:
            raise CorruptError(
                f"{self.name}: buckets {list(wanted)} of weights {version} arrived corrupted "
                f"{1 + self._config.resends} times"
            )
        self._routes.observe(route, version, self._clock() - began, self._opening_s)

    async def _open_channel(self, route: Route) -> None:
        """Open both ends of the channel; the replica is ready when its end is."""
        if route.carrier in self._channels:
            await self._receive("ready")
        else:
            channel = self._routes.channel(route, replace(self._link, endpoint=route.endpoint))
            self._channels[route.carrier] = channel
            await together(channel.open(self._config.ready_s), self._receive("ready"))
        self.suspect = False

    async def _transfer(
        self, channel: Channel, source: WeightSource, wanted: Sequence[int]
    ) -> list[int]:
        """Send `wanted` buckets; returns those that arrived corrupted."""
        manifest = source.manifest
        corrupted: list[int] = []

        async def send() -> None:
            for index in wanted:
                await channel.send(manifest, index, source.bucket(index))

        async def acknowledge() -> None:
            for index in wanted:
                deadline_s = self._config.deadline_s(manifest.bucket_bytes[index])
                received = (await self._expect("received", deadline_s)).received
                if received.bucket != index:
                    raise InfraError(
                        f"{self.name}: acknowledged bucket {received.bucket}, not {index}"
                    )
                if received.hash != manifest.bucket_hashes[index]:
                    corrupted.append(index)

        await self._send(manifest.version, transfer=pb.PlaneTransfer(buckets=wanted))
        await together(send(), acknowledge())
        for index in corrupted:
            _check_source(manifest, index, source)
        return corrupted

    async def _expect(self, kind: str, deadline_s: float) -> pb.ReplicaMessage:
        message = await within(
            self._receive(kind), deadline_s, f"{self.name}: {kind.upper()}", self._mark_suspect
        )
        self.suspect = False
        return message

    async def _receive(self, kind: str) -> pb.ReplicaMessage:
        message = await self.stream.receive()
        body = message.WhichOneof("body")
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


def _check_source(manifest: WeightManifest, index: int, source: WeightSource) -> None:
    """Before a bucket is sent again: raises SourceError when the source itself is wrong."""
    actual = digest(source.bucket(index))
    if actual != manifest.bucket_hashes[index]:
        wrong = wrong_tensors(manifest, index, source.bucket(index))
        raise SourceError(
            f"bucket {index} of weights {manifest.version} has hash {actual}, its manifest says "
            f"{manifest.bucket_hashes[index]}: the trainer's memory changed after the version was made ({wrong})"
        )
