"""The replica's end of one joining: from the first PROPOSE to the end of the stream."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

import numpy as np

from meshrl.config.weights import WeightsConfig
from meshrl.contract.errors import (
    ConflictError,
    CorruptError,
    FencedError,
    InfraError,
    MeshError,
    UnavailableError,
    UserError,
    from_detail,
)
from meshrl.contract.ports import WeightSink
from meshrl.contract.types import Uint8, Version, WeightManifest
from meshrl.v1 import weights_pb2 as pb
from meshrl.weights.carrier import Carriers, Cell, Link
from meshrl.weights.lora_merging import Merger
from meshrl.weights.messages import (
    Line,
    digest,
    manifest_noun,
    stamp,
    stamped_version,
    wrong_tensors,
)

logger = logging.getLogger(__name__)

AgentLine = Line[pb.PlaneMessage, pb.ReplicaMessage]
_FAREWELL_S = 2.0


class Session:
    """Answers the plane, message by message. What is staged lives in the engine; nothing else outlives `close`."""

    def __init__(
        self,
        config: WeightsConfig,
        *,
        welcome: pb.PlaneMessage,
        line: AgentLine,
        carriers: Carriers,
        engine: WeightSink,
        version: Callable[[], Version | None],
        commit: Callable[[Version], Awaitable[float]],
        merger: Merger,
    ) -> None:
        self._config = config
        self._run = welcome.stamp.run
        self._epoch = welcome.stamp.epoch
        self._generation = welcome.stamp.generation
        self._line = line
        self._carriers = carriers
        self._engine = engine
        self._version = version
        self._commit_engine = commit
        self._merger = merger
        self._cells: dict[str, Cell] = {}
        self._cell: Cell | None = None
        """The one that brings the proposed version."""
        self._manifest: WeightManifest | None = None
        self._buckets: list[Uint8] = []
        self._missing: set[int] = set()
        self._staged: Version | None = None
        self.failure: MeshError | None = None
        """What went wrong on this side."""

    @staticmethod
    def overhear(message: pb.PlaneMessage) -> None:
        """Raise at once what the plane says when it shows this replica the door."""
        if message.WhichOneof("body") == "abort" and message.abort.final:
            raise from_detail(message.abort.code, message.abort.message, {})

    async def act(self) -> None:
        """Do what the plane says, in order, for as long as the stream lasts.

        Raises:
            MeshError: what failed here; the plane has been told.
        """
        while True:
            message = (
                await self._line.hear()
            )  # idle for as long as no version comes: `pump` has the deadline
            body = message.WhichOneof("body")
            version = stamped_version(message.stamp)
            try:
                await self._answer(message, body or "nothing", version)
            except MeshError as error:
                self.failure = error
                failed = pb.ReplicaFailed(code=error.code, message=str(error))
                await self._tell(version, failed=failed)
                # The plane answers by hanging up; leaving first would cancel the stream with the message in it.
                await asyncio.sleep(_FAREWELL_S)
                raise

    async def close(self) -> None:
        """Forget what is not committed; idempotent."""
        for cell in self._cells.values():
            await cell.close()
        await self._discard()

    async def _answer(self, message: pb.PlaneMessage, body: str, version: Version) -> None:
        if body == "propose":
            await self._propose(message)
        elif body == "transfer":
            await self._transfer(version, message.transfer.buckets)
        elif body == "commit":
            await self._commit(version)
        elif body == "abort":
            await self._discard()
        else:
            raise InfraError(f"the plane said {body}, which this process does not know")

    async def _propose(self, message: pb.PlaneMessage) -> None:
        manifest = manifest_noun(message.stamp, message.propose.manifest)
        serving = self._version()
        if manifest.version.epoch != self._epoch or (serving and manifest.version < serving):
            raise FencedError(f"version {manifest.version} was proposed to an engine at {serving}")
        await self._discard()
        self._manifest = manifest
        # Fresh memory for each version: an engine may keep these very arrays until, and after, the commit.
        self._buckets = [np.empty(nbytes, dtype=np.uint8) for nbytes in manifest.bucket_bytes]
        self._missing = set(range(len(self._buckets)))
        self._cell = await self._meet(message.propose)
        await self._tell(manifest.version, ready=pb.ReplicaReady())

    async def _meet(self, proposed: pb.PlanePropose) -> Cell:
        """This end of the cell by the carrier that the plane chose, open."""
        cell = self._cells.get(proposed.carrier)
        if cell is not None:
            return cell
        link = Link(
            run=self._run,
            epoch=self._epoch,
            generation=self._generation,
            endpoint=proposed.endpoint,
            rank=1,
        )
        cell = self._cells[proposed.carrier] = self._carriers[proposed.carrier].cell(link)
        try:
            await cell.open(self._config.ready_s)
        except UserError as error:
            if len(self._carriers.names) == 1:
                raise
            raise UnavailableError(str(error)) from error  # there are other carriers to be tried
        return cell

    async def _transfer(self, version: Version, indices: Sequence[int]) -> None:
        manifest = self._manifest
        if manifest is None or manifest.version != version or self._cell is None:
            raise ConflictError(f"buckets of version {version}, which was not proposed")
        for index in indices:
            found = ""
            try:
                lent = await self._cell.receive(manifest, index, self._buckets[index])
                if lent is not None:
                    self._buckets[index] = lent
                found = await asyncio.to_thread(digest, self._buckets[index])
            except CorruptError:
                found = ""  # reported as a hash that no bucket has: the plane sends it again
            if found == manifest.bucket_hashes[index]:
                self._missing.discard(index)
            elif found:
                wrong = await asyncio.to_thread(
                    wrong_tensors, manifest, index, self._buckets[index]
                )
                logger.warning("weights %s arrived wrong: %s", version, wrong)
            received = pb.ReplicaReceived(bucket=index, hash=found)
            await self._tell(version, received=received)
        if not self._missing:
            await self._stage(manifest)

    async def _stage(self, manifest: WeightManifest) -> None:
        self._staged = manifest.version
        served, buckets = manifest.served, self._buckets
        if manifest.adapter is not None:
            buckets = await asyncio.to_thread(self._merger.merge, manifest, buckets)
        try:
            await self._engine.stage_weights(served, buckets)
        except MeshError:
            raise
        except Exception as error:  # whatever an engine's library raises is this engine's failure
            raise InfraError(f"staging weights {manifest.version}: {error!r}") from error
        self._manifest, self._buckets = None, []
        prepared = pb.ReplicaPrepared(hashes=served.bucket_hashes)
        await self._tell(manifest.version, prepared=prepared)

    async def _commit(self, version: Version) -> None:
        pause_s = 0.0
        if self._version() != version:  # committing twice is committing once
            if self._staged != version:
                raise ConflictError(
                    f"version {version} is to be committed, {self._staged} is staged"
                )
            self._staged = None
            pause_s = await self._commit_engine(version)
        for cell in self._cells.values():
            cell.committed(version)
        await self._tell(version, committed=pb.ReplicaCommitted(pause_s=pause_s))

    async def _discard(self) -> None:
        self._manifest, self._buckets = None, []
        if self._staged is not None:
            staged, self._staged = self._staged, None
            await self._engine.discard_weights(staged)

    async def _tell(self, version: Version, **body: object) -> None:
        about = stamp(self._run, self._generation, version)
        await self._line.tell(pb.ReplicaMessage(stamp=about, **body))  # type: ignore[arg-type]
