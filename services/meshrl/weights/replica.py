"""The plane's end of one replica: the conversation that brings a version to it, and what is known of it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from meshrl.config.weights import WeightsConfig
from meshrl.contract.errors import CorruptError, InfraError, MeshError, from_detail
from meshrl.contract.ports import WeightSource
from meshrl.contract.types import Version, WeightManifest
from meshrl.v1 import weights_pb2 as pb
from meshrl.weights.carrier import Cell, Link
from meshrl.weights.deadlines import together, within
from meshrl.weights.fleet import ReplicaState, ReplicaView
from meshrl.weights.messages import Line, digest, manifest_message, stamp, wrong_tensors
from meshrl.weights.routes import Peer, Route, Routes

PlaneLine = Line[pb.ReplicaMessage, pb.PlaneMessage]


class SourceError(CorruptError):
    """The source's own bytes are not what its manifest says: nobody downstream is to blame."""


class Replica:
    """One joining of one rollout process. Every wait below follows a progress rule; none touches another replica."""

    def __init__(
        self,
        hello: pb.ReplicaMessage,
        *,
        version: Version | None,
        line: PlaneLine,
        link: Link,
        peer: Peer,
        ways: Routes,
        config: WeightsConfig,
    ) -> None:
        self.name = hello.hello.replica
        self.address = hello.hello.address
        self.generation = link.generation
        self.peer = peer
        self.version = version
        self.line = line
        self.state = ReplicaState.JOINING
        self.suspect = False
        self.reason = ""
        self.last_sync_s = 0.0
        self.pause_s = 0.0
        self._run = hello.stamp.run
        self._commit_s = max(hello.hello.commit_deadline_s, config.commit_s)
        self._link = link
        self._ways = ways
        self._config = config
        self._cells: dict[str, Cell] = {}
        """By carrier; open, but for the one that `_meet` is at."""
        self._way: Route | None = None
        """Of the last version, or of the one under way."""
        self._moving = False
        """Between PROPOSE and the last RECEIVED: what fails now may be the carrier's doing."""

    @property
    def view(self) -> ReplicaView:
        """As `Fleet` shows it."""
        late = self.suspect and self.state is not ReplicaState.OUT
        return ReplicaView(
            name=self.name,
            state=ReplicaState.SUSPECT if late else self.state,
            generation=self.generation,
            version=self.version,
            last_sync_s=self.last_sync_s,
            pause_s=self.pause_s,
            reason=self.reason,
            carrier=self._way.carrier if self._way else "",
            address=self.address,
        )

    async def prepare(self, source: WeightSource) -> None:
        """PROPOSE … PREPARED: the replica holds the version, verified; its engine is untouched.

        Raises:
            SourceError: the source's bytes are not what its manifest says.
            MeshError: the replica failed, hung or received corrupted bytes too often.
        """
        manifest = source.manifest
        self._began = time.monotonic()
        way = self._way = await self._ways.choose(self.peer, source)
        message = pb.PlanePropose(
            manifest=manifest_message(manifest), endpoint=way.endpoint, carrier=way.carrier
        )
        await self._tell(manifest.version, propose=message)
        self._moving = True
        try:
            await self._carry(source, way)
        except SourceError:
            raise
        except MeshError:
            self._blame_way()
            raise
        finally:
            self._moving = False
        served = manifest.served
        prepared = await self._expect("prepared", self._config.deadline_s(served.total_bytes))
        if tuple(prepared.prepared.hashes) != served.bucket_hashes:
            raise CorruptError(f"{self.name}: staged bytes of weights {manifest.version} differ")
        if self.state is ReplicaState.JOINING:
            self.state = ReplicaState.SYNCED

    async def commit(self, version: Version) -> None:
        """COMMIT … COMMITTED: the engine serves the version."""
        await self._tell(version, commit=pb.PlaneCommit())
        committed = await self._expect("committed", self._commit_s)
        self.version = version
        for cell in self._cells.values():
            cell.committed(version)
        self.state = ReplicaState.SERVING
        self.pause_s = committed.committed.pause_s
        self.last_sync_s = time.monotonic() - self._began

    async def drop(self, version: Version, reason: str) -> None:
        """The prepared version will not come; the replica stays in the fleet."""
        await self._tell(version, abort=pb.PlaneAbort(code="corrupt", message=reason))

    def out(self, reason: str) -> None:
        """Given up: whatever is still moving to it is cut."""
        self.state, self.suspect, self.reason = ReplicaState.OUT, False, reason
        for cell in self._cells.values():
            cell.abort()

    def overhear(self, message: pb.ReplicaMessage) -> None:
        """Raise at once what the replica says has failed, whatever is being waited for."""
        if message.WhichOneof("body") == "failed":
            self._blame_way()
            raise from_detail(message.failed.code, f"{self.name}: {message.failed.message}", {})

    async def _carry(self, source: WeightSource, way: Route) -> None:
        """READY … RECEIVED of the last bucket, whole."""
        version = source.manifest.version
        proposed_at = time.monotonic()
        await within(self._meet(way), self._config.ready_s, f"{self.name}: READY", self._late)
        began = time.monotonic()
        cell = self._cells[way.carrier]
        wanted: Sequence[int] = range(len(source.manifest.bucket_bytes))
        for _ in range(1 + self._config.resends):
            wanted = await self._transfer(cell, source, wanted)
            if not wanted:
                break
        else:
            raise CorruptError(
                f"{self.name}: buckets {list(wanted)} of weights {version} arrived corrupted "
                f"{1 + self._config.resends} times"
            )
        self._ways.observe(way, version, time.monotonic() - began, began - proposed_at)

    async def _meet(self, way: Route) -> None:
        """Open both ends of the cell; the replica is ready when its end is."""
        if way.carrier in self._cells:
            await self._hear("ready")
        else:
            cell = self._ways.cell(way, replace(self._link, endpoint=way.endpoint))
            self._cells[way.carrier] = cell
            await together(cell.open(self._config.ready_s), self._hear("ready"))
        self.suspect = False

    async def _transfer(self, cell: Cell, source: WeightSource, wanted: Sequence[int]) -> list[int]:
        """Send `wanted` buckets; returns those that arrived corrupted."""
        manifest = source.manifest
        spoiled: list[int] = []

        async def send() -> None:
            for index in wanted:
                await cell.send(manifest, index, source.bucket(index))

        async def acknowledge() -> None:
            for index in wanted:
                patience = self._config.deadline_s(manifest.bucket_bytes[index])
                received = (await self._expect("received", patience)).received
                if received.bucket != index:
                    raise InfraError(
                        f"{self.name}: acknowledged bucket {received.bucket}, not {index}"
                    )
                if received.hash != manifest.bucket_hashes[index]:
                    spoiled.append(index)

        await self._tell(manifest.version, transfer=pb.PlaneTransfer(buckets=wanted))
        await together(send(), acknowledge())
        for index in spoiled:
            _vouch(manifest, index, source)
        return spoiled

    async def _expect(self, kind: str, deadline_s: float) -> pb.ReplicaMessage:
        message = await within(
            self._hear(kind), deadline_s, f"{self.name}: {kind.upper()}", self._late
        )
        self.suspect = False
        return message

    async def _hear(self, kind: str) -> pb.ReplicaMessage:
        message = await self.line.hear()
        body = message.WhichOneof("body")
        if body != kind:
            raise InfraError(f"{self.name}: said {body}, not {kind}")
        return message

    async def _tell(self, version: Version, **body: object) -> None:
        about = stamp(self._run, self.generation, version)
        await self.line.tell(pb.PlaneMessage(stamp=about, **body))  # type: ignore[arg-type]

    def _blame_way(self) -> None:
        if self._moving and self._way is not None:
            self._moving = False
            self._ways.failed(self._way)

    def _late(self) -> None:
        self.suspect = True


def _vouch(manifest: WeightManifest, index: int, source: WeightSource) -> None:
    """Before a replica is sent a bucket again: is it the source that is wrong?"""
    actual = digest(source.bucket(index))
    if actual != manifest.bucket_hashes[index]:
        wrong = wrong_tensors(manifest, index, source.bucket(index))
        raise SourceError(
            f"bucket {index} of weights {manifest.version} has hash {actual}, its manifest says "
            f"{manifest.bucket_hashes[index]}: the trainer's memory changed after the version was made ({wrong})"
        )
