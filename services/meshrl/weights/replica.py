"""The coordinator's side of one replica: its state, and the messages by which it takes part in a version."""

from __future__ import annotations

import asyncio

from meshrl.config.weights import WeightsConfig
from meshrl.contract.errors import CorruptError, from_detail
from meshrl.contract.ports import WeightSource
from meshrl.contract.types import Version
from meshrl.v1 import weights_pb2 as pb
from meshrl.weights.fleet import REPLICA_REPORT, ReplicaReport, ReplicaState, ReplicaView
from meshrl.weights.messages import Receiver
from meshrl.weights.transport import Delivery, Transport


class Replica:
    """One joining of one rollout process, as the transaction knows it; its receiver is the transport's.

    Every wait below has a progress deadline; none affects another replica.
    """

    def __init__(
        self,
        hello: pb.ReplicaMessage,
        *,
        version: Version | None,
        receiver: Receiver,
        transport: Transport,
        config: WeightsConfig,
    ) -> None:
        self.receiver = receiver
        self.name = receiver.peer.name
        self.generation = receiver.link.generation
        """The number of this joining."""
        self.version = version
        """What its engine serves."""
        self.planned: Delivery | None = None
        """Of the version that it takes together with others next."""
        self._delivery: Delivery | None = None
        """Of the version that it takes now; not afterwards, for it keeps the version in memory."""
        self.carrier = ""
        """The carrier of its last version, or of the one in transfer."""
        self.state = ReplicaState.JOINING
        self.reason = ""
        self.last_sync_s = 0.0
        self.pause_s = 0.0
        self.moved_bytes = 0
        self.report: ReplicaReport | None = None
        """Its last report."""
        self._clock = asyncio.get_running_loop().time
        self._commit_s = max(hello.hello.commit_deadline_s, config.commit_s)
        self._transport = transport
        self._config = config
        self._served_bytes = 0
        """Of the last version that was prepared."""

    @property
    def view(self) -> ReplicaView:
        """What the RPC `Fleet` shows."""
        late = self.receiver.suspect and self.state is not ReplicaState.OUT
        return ReplicaView(
            name=self.name,
            state=ReplicaState.SUSPECT if late else self.state,
            generation=self.generation,
            version=self.version,
            last_sync_s=self.last_sync_s,
            pause_s=self.pause_s,
            reason=self.reason,
            carrier=self.carrier,
            moved_bytes=self.moved_bytes,
            report=None if self.state is ReplicaState.OUT else self.report,
        )

    async def begin(self, source: WeightSource) -> None:
        """PROPOSE … READY: the replica has the manifest, and both ends of a channel are open.

        Another version may follow: the replica forgets this one.

        Raises:
            MeshError: the replica failed or hung.
        """
        self._began = self._clock()
        if self.planned is not None and self.planned.source is source:
            self._delivery, self.planned = self.planned, None
        else:
            (self._delivery,) = await self._transport.send(source, [self.receiver])
        self.carrier = self._delivery.carrier
        await self._delivery.propose()

    async def prepare(self, source: WeightSource) -> None:
        """TRANSFER … PREPARED of what was proposed: the replica holds it, verified; its engine is untouched.

        Raises:
            SourceError: the source's bytes are not what its manifest says.
            MeshError: the replica failed, hung or received corrupted bytes too often.
        """
        assert self._delivery is not None
        await self._delivery.transfer()
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
        await self.receiver.say(version, commit=pb.PlaneCommit())
        deadline_s = self._commit_s + self._config.switch_s(self._served_bytes)
        committed = await self._expect("committed", deadline_s)
        self.version = version
        delivery, self._delivery = self._delivery, None
        assert delivery is not None
        delivery.committed()
        self.state = ReplicaState.SERVING
        self.pause_s = committed.committed.pause_s
        self.last_sync_s = self._clock() - self._began
        self.moved_bytes = delivery.moved_bytes

    def skip(self) -> None:
        """Nothing is sent to it of what was proposed."""
        assert self._delivery is not None
        self._delivery.skip()
        self._delivery = None

    async def drop(self, version: Version, reason: str) -> None:
        """Withdraw the prepared version; the replica stays in the fleet."""
        self._delivery = None
        await self.receiver.say(version, abort=pb.PlaneAbort(code="corrupt", message=reason))

    def give_up(self, reason: str) -> None:
        """Mark the replica as out."""
        self.state, self.reason = ReplicaState.OUT, reason
        self.planned = self._delivery = None

    def inspect(self, message: pb.ReplicaMessage) -> bool:
        """Raise the failure that the replica tells of, whatever this side waits for; keep what it says of itself."""
        if message.WhichOneof("body") == "report":
            self.report = REPLICA_REPORT.decode(message.report)
            return True
        if message.WhichOneof("body") == "failed":
            raise from_detail(message.failed.code, f"{self.name}: {message.failed.message}", {})
        return False

    async def _expect(self, kind: str, deadline_s: float) -> pb.ReplicaMessage:
        heard = self.receiver.hear(kind)
        return await self.receiver.progressing(heard, deadline_s, kind.upper())
