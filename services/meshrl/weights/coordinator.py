"""The weight plane's coordinator, in the trainer's process: a version is a transaction of the whole fleet.

    publish(v) ──▶ offered ──▶ staged ──▶ Transaction(v) ──────────────▶ committed ──▶ on_committed(v) ──▶ queue
                                             ▲        │ may commit?
              one task per replica:  enter ──┘        ▼
              propose ▸ ready ▸ transfer ▸ prepared ▸ commit ▸ committed ▸ wait for a newer one

Consumes versions from the trainer and streams from the replicas. Waits for: progress of each replica, under a
deadline each. Unblocked by: any replica's progress or end. Produces: engines that serve what the trainer has.
All state belongs to one event loop and is announced through one Condition.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Self

from meshrl.config.weights import WeightsConfig
from meshrl.contract.errors import (
    ConflictError,
    FencedError,
    InfraError,
    MeshError,
    UnavailableError,
    UserError,
)
from meshrl.contract.ports import WeightSource
from meshrl.contract.types import Version
from meshrl.v1 import weights_pb2 as pb
from meshrl.weights.carrier import Link, Place
from meshrl.weights.deadlines import first_ends
from meshrl.weights.fleet import FleetView, ReplicaState
from meshrl.weights.messages import stamp, stamped_version
from meshrl.weights.replica import PlaneLine, Replica, SourceError
from meshrl.weights.routes import Peer, Routes
from meshrl.weights.transaction import Phase, Transaction

logger = logging.getLogger(__name__)
_LATE_SHARE = 0.5
"""Of the time that half of the replicas took: what the others get on top of it."""


class WeightCoordinator:
    """The Publisher of a trainer that holds epoch `epoch` of `run`. Use as an async context manager."""

    def __init__(
        self,
        config: WeightsConfig,
        *,
        run: str,
        epoch: int,
        place: Place,
        on_committed: Callable[[Version], Awaitable[None]],
    ) -> None:
        self._config = config
        self._run = run
        self._epoch = epoch
        self._on_committed = on_committed
        self._ways = Routes(config, place)
        self._changed = asyncio.Condition()
        self._offered: WeightSource | None = None
        self._proposed: Transaction | None = None
        self._committed: Transaction | None = None
        self._failure: BaseException | None = None
        self._replicas: dict[str, Replica] = {}
        """The newest joining under each name, also of those that are out."""
        self._doors: dict[int, asyncio.Future[None]] = {}
        """Of the live replicas, by generation: an error set here shows one the door."""
        self._generation = 0
        self._task: asyncio.Task[None] | None = None
        self._hurry: asyncio.Task[None] | None = None
        """Waits for the stragglers of the proposed version."""
        self._proposed_at = 0.0
        self._closed = False

    async def start(self) -> None:
        """Open the carrier. Raises ConfigError when it cannot listen."""
        await self._ways.start()
        self._task = asyncio.create_task(self._carry_versions(), name="weight-plane")

    async def close(self) -> None:
        """Part from all replicas; idempotent. What is not committed by now (see `drained`) never is."""
        self._closed = True
        for task in filter(None, (self._task, self._hurry)):
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        for generation in self._doors:
            self._show_out(generation, "the weight plane closes")
        await self._announce()
        await self._until(lambda: not self._doors)  # nobody refuses: see `serve`
        await self._ways.close()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    # The Publisher port: the trainer's side.

    async def publish(self, source: WeightSource) -> None:
        """Hand a version over; returns once the previous one is through. Publishing twice is publishing once.

        A version that no replica takes part in waits as the newest one and is through: the next one replaces it.

        Raises:
            SourceError: the *previous* version's bytes had changed after its manifest was made.
            ConflictError: the version is not of this epoch, or older than one that was published.
            MeshError: the carrier could not stage the previous version, or the queue refused it.
        """
        version = source.manifest.version
        if version.epoch != self._epoch or source.manifest.run != self._run:
            raise ConflictError(
                f"version {version} of {source.manifest.run!r} on the plane of {self._run!r}, epoch {self._epoch}"
            )
        await self.drained()
        newest = self._newest
        if newest is not None and version < newest:
            raise ConflictError(f"version {version} after {newest}: versions never go back")
        if version != newest:
            self._offered = source
            await self._announce()

    async def drained(self) -> None:
        """Return when nothing is in transfer. Raises what the last transfer failed with."""
        await self._until(lambda: self._failure is not None or self._closed or not self._busy)
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
        if self._closed:
            raise UnavailableError("the weight plane is closed")

    @property
    def silence_s(self) -> float:
        """A replica that says nothing for this long is given up."""
        return self._config.silence_s

    def fleet(self) -> FleetView:
        """Who belongs to the fleet, and at which version."""
        return FleetView(
            run=self._run,
            epoch=self._epoch,
            committed=self._committed.version if self._committed else None,
            proposed=self._proposed.version if self._proposed else None,
            replicas=tuple(replica.view for replica in self._replicas.values()),
        )

    # The replicas' side.

    async def serve(self, line: PlaneLine) -> None:
        """Look after one replica from its HELLO until it leaves, hangs or dies.

        Returns when it is out, having told it why if it still listens.
        """
        hello = await line.receive()
        try:
            replica = self._admit(hello, line)
        except MeshError as error:
            await self._dismiss(line, 0, error)
            return
        generation = replica.generation
        door = self._doors[generation] = asyncio.get_running_loop().create_future()
        beat = pb.PlaneMessage(stamp=stamp(self._run, generation, None), beat=pb.Beat())
        failure: MeshError = UnavailableError("it died or went away")
        try:
            await self._announce()
            await self._welcome(replica)
            await first_ends(
                line.pump(generation, replica.overhear),
                line.beat(beat, self._config.beat_s),
                self._tend(replica),
                door,
            )
        except MeshError as error:
            failure = error
        except Exception as error:  # one conversation that breaks must not cost the fleet
            logger.exception("the conversation with replica %s broke", replica.name)
            failure = InfraError(repr(error))
        finally:
            # Out of the transaction first: the others must not wait while this one is told.
            replica.out(str(failure))
            del self._doors[generation]
            for transaction in filter(None, (self._committed, self._proposed)):
                transaction.leave(generation)
            await self._announce()
            logger.warning("replica %s is out: %s", replica.name, failure)
        await self._dismiss(line, generation, failure)

    def _admit(self, hello: pb.ReplicaMessage, line: PlaneLine) -> Replica:
        if hello.WhichOneof("body") != "hello" or not hello.hello.replica:
            raise UserError("a replica joins with HELLO and its name")
        if hello.stamp.run != self._run:
            raise UserError(f"this plane carries run {self._run!r}, not {hello.stamp.run!r}")
        if hello.hello.highest_epoch > self._epoch:
            raise FencedError(
                f"epoch {self._epoch} is over: {hello.hello.replica} has seen {hello.hello.highest_epoch}"
            )
        if self._closed:
            raise UnavailableError("the weight plane is closed")
        peer = Peer(
            name=hello.hello.replica,
            host=hello.hello.host,
            carriers=tuple(hello.hello.carriers),
        )
        self._ways.check(peer)
        before = self._replicas.get(hello.hello.replica)
        if before is not None:  # the process was restarted, or found its way back
            self._show_out(before.generation, "joined again")
        self._generation += 1
        link = Link(
            run=self._run, epoch=self._epoch, generation=self._generation, endpoint="", rank=0
        )
        replica = Replica(
            hello,
            version=stamped_version(hello.stamp) if hello.hello.serving else None,
            line=line,
            link=link,
            peer=peer,
            ways=self._ways,
            config=self._config,
        )
        committed = self._committed.version if self._committed else None
        proposed = self._proposed
        if replica.version is not None and replica.version == committed:
            replica.state = ReplicaState.SERVING
        elif proposed is not None and replica.version == proposed.version:
            # It switched, and its COMMITTED was lost with the stream that it would have come by.
            replica.state = ReplicaState.SERVING
            proposed.holds(replica.generation)
        self._replicas[replica.name] = replica
        return replica

    async def _welcome(self, replica: Replica) -> None:
        welcome = pb.PlaneWelcome(beat_s=self._config.beat_s, silence_s=self._config.silence_s)
        # The stamp's epoch is what the replica fences by.
        about = stamp(self._run, replica.generation, Version(self._epoch, 0))
        await replica.line.tell(pb.PlaneMessage(stamp=about, welcome=welcome))

    async def _tend(self, replica: Replica) -> None:
        """Bring version after version to one replica, the newest committed one before any proposed one."""
        while True:
            await self._until(lambda: self._next_for(replica) is not None)
            transaction = self._next_for(replica)
            if transaction is not None:
                await self._bring(transaction, replica)

    async def _bring(self, transaction: Transaction, replica: Replica) -> None:
        transaction.enter(replica.generation)
        try:
            await replica.prepare(transaction.source)
        except SourceError as error:
            if transaction.may_commit:
                raise
            if transaction.phase is not Phase.DROPPED:
                self._failure = error
            transaction.drop()
        else:
            transaction.prepared(replica.generation)
            if transaction is self._proposed and transaction.half_prepared and self._hurry is None:
                self._hurry = asyncio.create_task(self._hurry_up(transaction), name="stragglers")
        await self._announce()
        # Bounded: every replica that is waited for here has a progress deadline of its own.
        await self._until(lambda: transaction.may_commit or transaction.phase is Phase.DROPPED)
        if transaction.phase is Phase.DROPPED:
            await replica.drop(transaction.version, "the trainer withdrew this version")
            return
        await replica.commit(transaction.version)
        transaction.committed(replica.generation)
        await self._announce()

    async def _hurry_up(self, transaction: Transaction) -> None:
        """Half of the members hold the version: the others get half as long again."""
        taken_s = time.monotonic() - self._proposed_at
        await asyncio.sleep(max(self._config.late_s, _LATE_SHARE * taken_s))
        transaction.hurry()
        await self._announce()

    def _next_for(self, replica: Replica) -> Transaction | None:
        for transaction in (self._committed, self._proposed):
            if transaction is None or transaction.phase is Phase.DROPPED:
                continue
            if replica.version is None or replica.version < transaction.version:
                return transaction
        return None

    def _show_out(self, generation: int, reason: str) -> None:
        door = self._doors.get(generation)
        if door is not None and not door.done():
            door.set_exception(UnavailableError(reason))

    async def _dismiss(self, line: PlaneLine, generation: int, error: MeshError) -> None:
        """Tell a replica why it is out, if it still listens."""
        abort = pb.PlaneAbort(code=error.code, message=str(error), final=True)
        try:
            await line.tell(pb.PlaneMessage(stamp=stamp(self._run, generation, None), abort=abort))
        except MeshError as deaf:
            logger.debug("could not tell a replica that it is out: %s", deaf)

    # Versions.

    async def _carry_versions(self) -> None:
        """Take versions one by one from offered to committed. Owned by `close`."""
        while True:
            await self._until(lambda: self._offered is not None or self._through)
            try:
                if self._through:
                    await self._conclude()
                else:
                    await self._propose()
            except Exception as error:  # raised to the trainer by `publish` or `drained`
                self._failure, self._offered = error, None
                self._proposed = None if self._through else self._proposed
            await self._announce()

    async def _propose(self) -> None:
        source = self._offered
        assert source is not None
        await self._ways.stage(source, [replica.peer for replica in self._candidates()])
        members = [replica.generation for replica in self._candidates()]
        if self._proposed is not None:
            logger.info(
                "version %s replaces %s, which nobody took",
                source.manifest.version,
                self._proposed.version,
            )
        self._proposed = Transaction(source, members, self._config.quorum, self._config.late_quorum)
        self._proposed_at = time.monotonic()
        if self._hurry is not None:
            self._hurry.cancel()
            self._hurry = None
        self._offered = None

    async def _conclude(self) -> None:
        transaction = self._proposed
        assert transaction is not None
        if transaction.phase is Phase.COMMITTED:
            # From here on joiners get it; the queue hears of it only now that engines serve it.
            self._committed = transaction
            self._ways.committed(transaction.source)
            await self._on_committed(transaction.version)
            logger.info("version %s is committed", transaction.version)
        self._proposed = None

    def _candidates(self) -> list[Replica]:
        """Members of a version that is proposed now.

        Who is still on its way to the committed one is none: it follows when it gets there.
        """
        committed = self._committed.version if self._committed else None
        return [
            replica
            for replica in self._replicas.values()
            if replica.state is not ReplicaState.OUT
            and (committed is None or replica.version == committed)
        ]

    @property
    def _through(self) -> bool:
        """The proposed version has come to its end."""
        done = (Phase.COMMITTED, Phase.DROPPED)
        return self._proposed is not None and self._proposed.phase in done

    @property
    def _busy(self) -> bool:
        """Something is in transfer, or about to be."""
        proposed = self._proposed
        parked = proposed is None or proposed.phase is Phase.PARKED
        return self._offered is not None or not parked

    @property
    def _newest(self) -> Version | None:
        newest = self._proposed or self._committed
        return newest.version if newest else None

    async def _until(self, condition: Callable[[], bool]) -> None:
        async with self._changed:
            await self._changed.wait_for(condition)

    async def _announce(self) -> None:
        async with self._changed:
            self._changed.notify_all()
