"""The state of one version: which replicas must hold it, which do, and when it is committed; and each replica's.

PARKED ◀──────▶ PREPARING ──────▶ COMMITTING ──────▶ COMMITTED
  no replica      members prepare    prepared ones         at least one engine serves it
                                     switch                and no member is still switching
A version whose source changed after its manifest was made is DROPPED before any engine has seen it.
`Transaction` does no I/O; `Replica` has the messages by which a replica takes part.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable
from enum import StrEnum

from meshrl.config.weights import WeightsConfig
from meshrl.contract.errors import CorruptError, from_detail
from meshrl.contract.ports import WeightSource
from meshrl.contract.types import Version
from meshrl.v1 import weights_pb2 as pb
from meshrl.weights.fleet import REPLICA_REPORT, ReplicaReport, ReplicaState, ReplicaView
from meshrl.weights.messages import Receiver
from meshrl.weights.transport import Delivery, Transport


class Phase(StrEnum):
    """The progress of a version."""

    PARKED = "parked"
    PREPARING = "preparing"
    COMMITTING = "committing"
    COMMITTED = "committed"
    DROPPED = "dropped"


class Transaction:
    """A version and the replicas that take part in it; replicas are named by their generation.

    Members are fixed when the version is proposed, so that new joiners cannot delay it. A replica that joins later is
    a follower; followers become the members only when no member is left.
    """

    def __init__(
        self, source: WeightSource, members: Iterable[int], late_quorum: float = 1.0
    ) -> None:
        """`late_quorum` is the share of the members that suffices once `accept_late_quorum` was called."""
        self.source = source
        self.phase = Phase.PARKED
        self._quorum = 1.0
        self._late_quorum = late_quorum
        self._members = set(members)
        self._followers: set[int] = set()
        self._prepared: set[int] = set()
        self._committed: set[int] = set()
        self._advance()

    @property
    def version(self) -> Version:
        """The version."""
        return self.source.manifest.version

    @property
    def may_commit(self) -> bool:
        """True once the fleet has decided: a replica that holds the version may switch to it."""
        return self.phase in (Phase.COMMITTING, Phase.COMMITTED)

    @property
    def half_prepared(self) -> bool:
        """True once half of the members hold the version, and others are waited for."""
        holders = len(self._members & self._prepared)
        return self.phase is Phase.PREPARING and 2 * holders >= len(self._members)

    def accept_late_quorum(self) -> None:
        """Accept the late quorum from now on: the stragglers' time is over."""
        self._quorum = self._late_quorum
        self._advance()

    def enter(self, replica: int) -> None:
        """Note that a replica begins to receive the version."""
        if replica not in self._members:
            self._followers.add(replica)
        self._advance()

    def prepared(self, replica: int) -> None:
        """Note that a replica holds the verified version beside its engine."""
        self._prepared.add(replica)
        self._advance()

    def committed(self, replica: int) -> None:
        """Note that a replica's engine serves the version."""
        self._committed.add(replica)
        self._advance()

    def holds(self, replica: int) -> None:
        """Note that a replica that joins serves the version already."""
        self._followers.add(replica)
        self._prepared.add(replica)
        self.committed(replica)

    def leave(self, replica: int) -> None:
        """Remove a replica. Its earlier commit still counts: rows of this version may exist."""
        for group in (self._members, self._followers, self._prepared):
            group.discard(replica)
        self._advance()

    def drop(self) -> None:
        """Withdraw the version; without effect once it may be committed."""
        if not self.may_commit:
            self.phase = Phase.DROPPED

    def _advance(self) -> None:
        if self.phase in (Phase.DROPPED, Phase.COMMITTED):
            return
        if self.phase is Phase.COMMITTING:
            if self._members - self._committed:
                return
            if self._committed:
                self.phase = Phase.COMMITTED
                return
        # Still open, or open again because all members died between COMMIT and COMMITTED.
        if not self._members:
            self._members, self._followers = self._followers, set()
        holders = self._members & self._prepared
        self.phase = Phase.PREPARING if self._members else Phase.PARKED
        if holders and len(holders) >= math.ceil(self._quorum * len(self._members)):
            # Stragglers outside the quorum continue by themselves; only the holders are waited for.
            self._followers |= self._members - holders
            self._members = holders
            self.phase = Phase.COMMITTING
            self._advance()


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
        """The version that its engine serves."""
        self.planned: Delivery | None = None
        """Delivery of the next version, which it takes together with others."""
        self._delivery: Delivery | None = None
        """Delivery of the present version; None afterwards, for it keeps the version in memory."""
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
        """Bytes of the last version that was prepared."""

    @property
    def view(self) -> ReplicaView:
        """The replica as the RPC `Fleet` shows it."""
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
        """Send it nothing of the proposed version."""
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
