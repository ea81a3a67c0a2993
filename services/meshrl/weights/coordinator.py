"""The weight plane's coordinator, in the trainer's process: a version is a transaction of the whole fleet.

    publish(v) ──▶ offered ──▶ staged ──▶ Transaction(v) ──────────────▶ committed ──▶ on_committed(v) ──▶ queue
                                             ▲        │ may commit?
              one task per replica:  enter ──┘        ▼
              propose ▸ ready ▸ transfer ▸ prepared ▸ commit ▸ committed ▸ wait for a newer one

Consumes versions from the trainer and streams from the replicas. Waits for progress of each replica, each under its
own deadline. Unblocked by any replica's progress or end. Produces engines that serve what the trainer has.
All state belongs to one event loop; one Condition announces each change of it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Final, Self

from google.protobuf.unknown_fields import UnknownFieldSet

from meshrl.common import tracing
from meshrl.config.weights import WeightsConfig
from meshrl.contract.errors import (
    ConflictError,
    FencedError,
    InfraError,
    MeshError,
    NotFoundError,
    UnavailableError,
    UserError,
)
from meshrl.contract.ports import WeightSource
from meshrl.contract.types import Version, name_fault
from meshrl.v1 import weights_pb2 as pb
from meshrl.weights.carrier import Link
from meshrl.weights.fleet import FleetView, ReplicaState
from meshrl.weights.messages import (
    Peer,
    Receiver,
    ReplicaStream,
    SourceError,
    stamp,
    stamped_version,
)
from meshrl.weights.transaction import Phase, Replica, Transaction
from meshrl.weights.transport import Transport, check_reached
from meshrl.weights.waiting import first_ends

logger = logging.getLogger(__name__)
_ADDRESS_OF_0_1: Final = 7
"""The field of a HELLO with the worker's address, which only 0.1 sends."""
_SKIPS = 3
"""Versions in a row that a replica may pass over for a newer one: then it takes the one that it was proposed."""
_LATE_SHARE = 0.5
"""Stragglers get this share of the time that the faster half took, on top of that time …"""
_LATE_S = 1.0
"""… and at least so long: what takes milliseconds is no measure of a machine that stutters."""
_PACES = 2.0
"""Longest delay of the next version, in durations of the last committed one: a slow fleet sets the trainer's pace,
and one that hangs does not."""


class WeightCoordinator:
    """The Publisher of a trainer that holds epoch `epoch` of `run`. Use as an async context manager."""

    def __init__(
        self,
        config: WeightsConfig,
        *,
        run: str,
        epoch: int,
        transport: Transport,
        on_committed: Callable[[Version], Awaitable[None]],
    ) -> None:
        """`transport` is started and closed with this."""
        self._config = config
        self._run = run
        self._epoch = epoch
        self._on_committed = on_committed
        self._transport = transport
        self._clock = asyncio.get_running_loop().time
        self._changed = asyncio.Condition()
        self._offered: WeightSource | None = None
        self._proposed: Transaction | None = None
        self._committed: Transaction | None = None
        self._failure: BaseException | None = None
        self._replicas: dict[str, Replica] = {}
        """Newest joining of each replica by name, also of replicas that are out."""
        self._removals: dict[int, asyncio.Future[None]] = {}
        """Futures by generation, one for each live replica: an error set here removes the replica."""
        self._generation = 0
        self._task: asyncio.Task[None] | None = None
        self._straggler_wait: asyncio.Task[None] | None = None
        """The task that gives the stragglers of the proposed version their time."""
        self._proposed_at = 0.0
        self._begun_at = 0.0
        """When the proposed version, or the one that is being staged, was taken up."""
        self._pace_s: float | None = None
        """Seconds from `_begun_at` to the commit of the last version."""
        self._closed = False

    async def start(self) -> None:
        """Start the transport. Raises ConfigError when it cannot listen."""
        await self._transport.start()
        self._task = asyncio.create_task(self._carry_versions(), name="weight-coordinator")

    async def close(self) -> None:
        """Disconnect all replicas; idempotent. What is not committed by now (see `drained`) never will be."""
        self._closed = True
        for task in filter(None, (self._task, self._straggler_wait)):
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        for generation in self._removals:
            self._remove(generation, "the weight coordinator closes")
        await self._notify()
        # Ends soon: `serve` removes each replica, whatever it does.
        await self._wait_until(lambda: not self._removals)
        await self._transport.close()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *raised: object) -> None:
        await self.close()

    # The Publisher port: the trainer's side.

    async def publish(self, source: WeightSource) -> None:
        """Hand over a version; returns once the previous one is finished, or takes too long to be waited for.

        Then this one waits until it is, and a newer one replaces it; so it is with a version in which no replica
        takes part. Publishing twice is publishing once.

        Raises:
            SourceError: the *previous* version's bytes had changed after its manifest was made.
            ConflictError: the version is not of this epoch, or older than one that was published.
            MeshError: the carrier could not stage the previous version, or the queue refused it.
        """
        version = source.manifest.version
        if version.epoch != self._epoch or source.manifest.run != self._run:
            raise ConflictError(
                f"version {version} of {source.manifest.run!r} at a coordinator of {self._run!r}, epoch {self._epoch}"
            )
        waits_until = None
        if self._pace_s is not None:  # else no version was committed yet
            waits_until = self._begun_at + _PACES * self._pace_s
        with suppress(TimeoutError):
            async with asyncio.timeout_at(waits_until):
                await self.drained()
        newest = self._offered.manifest.version if self._offered is not None else None
        if newest is None and (last := self._proposed or self._committed) is not None:
            newest = last.version
        if newest is not None and version < newest:
            raise ConflictError(f"version {version} after {newest}: versions never go back")
        if version != newest:
            self._offered = source
            await self._notify()

    async def drained(self) -> None:
        """Return when nothing is in transfer. Raises the error of the last transfer, if it failed."""
        await self._wait_until(lambda: self._failure is not None or self._closed or not self._busy)
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
        if self._closed:
            raise UnavailableError("the weight coordinator is closed")

    @property
    def silence_s(self) -> float:
        """Seconds without a message from a replica after which it is out."""
        return self._config.silence_s

    def fleet(self) -> FleetView:
        """The replicas of the fleet, and their versions."""
        return FleetView(
            run=self._run,
            epoch=self._epoch,
            committed=self._committed.version if self._committed else None,
            proposed=self._proposed.version if self._proposed else None,
            replicas=tuple(replica.view for replica in self._replicas.values()),
        )

    async def drain(self, name: str) -> None:
        """Ask a replica to hand over what it runs and end. Raises NotFoundError, UnavailableError."""
        replica = self._replicas.get(name)
        if replica is None or replica.generation not in self._removals:
            live = [
                each.name for each in self._replicas.values() if each.generation in self._removals
            ]
            raise NotFoundError(
                f"no replica {name[:80]!r} is in the fleet (there are: {', '.join(live) or 'none'})"
            )
        about = stamp(self._run, replica.generation, None)
        await replica.receiver.stream.send(pb.PlaneMessage(stamp=about, leave=pb.PlaneLeave()))

    # The replicas' side.

    async def serve(self, stream: ReplicaStream) -> None:
        """Serve one replica from its HELLO until it leaves, hangs or dies.

        Returns when it is out; before that, sends it the reason if its stream is still open.
        """
        hello = await stream.read()
        try:
            replica = self._admit(hello, stream)
        except MeshError as error:
            await self._send_reason(stream, 0, error)
            return
        generation = replica.generation
        removal = self._removals[generation] = asyncio.get_running_loop().create_future()
        beat = pb.PlaneMessage(stamp=stamp(self._run, generation, None), beat=pb.Beat())
        failure: MeshError = UnavailableError("it died or left")
        try:
            await self._notify()
            # The stamp's epoch is what the replica fences by.
            about = stamp(self._run, generation, Version(self._epoch, 0))
            config = self._config
            welcome = pb.PlaneWelcome(beat_s=config.beat_s, silence_s=config.silence_s)
            await stream.send(pb.PlaneMessage(stamp=about, welcome=welcome))
            await first_ends(
                stream.read_loop(generation, replica.inspect),
                stream.heartbeat_loop(lambda: beat, self._config.beat_s),
                self._keep_updated(replica),
                removal,
            )
        except MeshError as error:
            failure = error
        except Exception as error:  # a failure with one replica must not end the others
            logger.exception("serving replica %s failed", replica.name)
            failure = InfraError(repr(error))
        finally:
            # Leave the transaction first: the others must not wait while this one is sent the reason.
            replica.give_up(str(failure))
            self._transport.leave(replica.receiver)
            del self._removals[generation]
            if removal.done() and not removal.cancelled():
                removal.exception()  # looked at: asyncio reports one that nobody did where the replica went by itself
            for transaction in filter(None, (self._committed, self._proposed)):
                transaction.leave(generation)
            await self._notify()
            # At the end of a run all are out, which is how it should be.
            level = logging.DEBUG if self._closed else logging.WARNING
            logger.log(level, "replica %s is out: %s", replica.name, failure)
        await self._send_reason(stream, generation, failure)

    def _admit(self, hello: pb.ReplicaMessage, stream: ReplicaStream) -> Replica:
        is_hello = hello.WhichOneof("body") == "hello"
        if fault := name_fault(hello.hello.replica) if is_hello else "there is none":
            raise UserError(f"a replica's first message must be HELLO with its name: {fault}")
        unknown = UnknownFieldSet(hello.hello)
        if _ADDRESS_OF_0_1 in [unknown[at].field_number for at in range(len(unknown))]:
            raise UserError(
                f"{hello.hello.replica} runs meshrl 0.1, which cannot take weights from this trainer:"
                " start it with the trainer's version"
            )
        if hello.stamp.run != self._run:
            raise UserError(f"this coordinator serves run {self._run!r}, not {hello.stamp.run!r}")
        if hello.hello.highest_epoch > self._epoch:
            raise FencedError(
                f"epoch {self._epoch} is over: {hello.hello.replica} has seen {hello.hello.highest_epoch}"
            )
        if self._closed:
            raise UnavailableError("the weight coordinator is closed")
        peer = Peer(
            name=hello.hello.replica,
            host=hello.hello.host,
            carriers=tuple(hello.hello.carriers),
        )
        check_reached(self._transport, peer)
        before = self._replicas.get(hello.hello.replica)
        if before is not None:  # the process was restarted, or connects again
            self._remove(before.generation, "joined again")
        self._generation += 1
        link = Link(
            run=self._run, epoch=self._epoch, generation=self._generation, endpoint="", rank=0
        )
        replica = Replica(
            hello,
            version=stamped_version(hello.stamp) if hello.hello.serving else None,
            receiver=Receiver(peer, link, stream),
            transport=self._transport,
            config=self._config,
        )
        committed = self._committed.version if self._committed else None
        proposed = self._proposed
        if replica.version is not None and replica.version == committed:
            replica.state = ReplicaState.SERVING
        elif proposed is not None and replica.version == proposed.version:
            # It switched, and its COMMITTED was lost with its stream.
            replica.state = ReplicaState.SERVING
            proposed.holds(replica.generation)
        self._replicas[replica.name] = replica
        return replica

    async def _keep_updated(self, replica: Replica) -> None:
        """Send version after version to one replica, the newest committed one before any proposed one."""
        skipped = 0
        while True:
            await self._wait_until(lambda: self._next_for(replica) is not None)
            transaction = self._next_for(replica)
            if transaction is None:
                continue
            if await self._deliver(transaction, replica, may_skip=skipped < _SKIPS):
                skipped = 0
            else:
                skipped += 1

    async def _deliver(
        self, transaction: Transaction, replica: Replica, *, may_skip: bool = False
    ) -> bool:
        """Bring a version to a replica; False if a newer one was committed before its bytes were sent."""
        began_ns = time.time_ns()
        transaction.enter(replica.generation)
        try:
            await replica.begin(transaction.source)
            committed = self._committed
            if may_skip and committed is not None and transaction.version < committed.version:
                replica.skip()
                transaction.leave(replica.generation)
                return False
            await replica.prepare(transaction.source)
        except SourceError as error:
            if transaction.may_commit:
                raise
            if transaction.phase is not Phase.DROPPED:
                self._failure = error
            transaction.drop()
        else:
            transaction.prepared(replica.generation)
            if (
                transaction is self._proposed
                and transaction.half_prepared
                and self._straggler_wait is None
            ):
                self._straggler_wait = asyncio.create_task(
                    self._wait_for_stragglers(transaction), name="stragglers"
                )
        await self._notify()
        # Bounded: every replica that this waits for has a progress deadline of its own.
        await self._wait_until(lambda: transaction.may_commit or transaction.phase is Phase.DROPPED)
        if transaction.phase is Phase.DROPPED:
            await replica.drop(transaction.version, "the trainer withdrew this version")
            return True
        await replica.commit(transaction.version)
        transaction.committed(replica.generation)
        if tracing.is_on():
            version = transaction.version
            tracing.record_step(
                "publish", self._run, version.epoch, max(0, version.step - 1), began_ns,
                replica=replica.name, version=str(version),
            )  # fmt: skip
        await self._notify()
        return True

    async def _wait_for_stragglers(self, transaction: Transaction) -> None:
        """Half of the members hold the version: wait half as long again, then accept the late quorum."""
        taken_s = self._clock() - self._proposed_at
        await asyncio.sleep(max(_LATE_S, _LATE_SHARE * taken_s))
        transaction.accept_late_quorum()
        await self._notify()

    def _next_for(self, replica: Replica) -> Transaction | None:
        for transaction in (self._committed, self._proposed):
            if transaction is None or transaction.phase is Phase.DROPPED:
                continue
            if replica.version is None or replica.version < transaction.version:
                return transaction
        return None

    def _remove(self, generation: int, reason: str) -> None:
        removal = self._removals.get(generation)
        if removal is not None and not removal.done():
            removal.set_exception(UnavailableError(reason))

    async def _send_reason(self, stream: ReplicaStream, generation: int, error: MeshError) -> None:
        """Send a replica the reason why it is out, if its stream is still open."""
        abort = pb.PlaneAbort(code=error.code, message=str(error), final=True)
        try:
            await stream.send(
                pb.PlaneMessage(stamp=stamp(self._run, generation, None), abort=abort)
            )
        except MeshError as failed:
            logger.debug("could not send a replica the reason why it is out: %s", failed)

    # Versions.

    async def _carry_versions(self) -> None:
        """Take versions one by one from offered to committed. Owned by `close`."""
        while True:
            await self._wait_until(lambda: self._may_propose or self._finished)
            try:
                if self._finished:
                    await self._conclude()
                else:
                    await self._propose()
            except Exception as error:  # raised to the trainer by `publish` or `drained`
                self._failure, self._offered = error, None
                self._proposed = None if self._finished else self._proposed
            await self._notify()

    async def _propose(self) -> None:
        source, parked = self._offered, self._proposed
        assert source is not None
        self._begun_at = self._clock()
        if parked is not None:
            # Nobody takes part. Staging takes a while: a replica that joined this one meanwhile would be left in it.
            parked.drop()
            self._proposed = None
            logger.info(
                "version %s replaces %s, which no replica received",
                source.manifest.version,
                parked.version,
            )
        candidates = self._candidates()
        deliveries = await self._transport.send(source, [each.receiver for each in candidates])
        members = self._candidates()
        for replica, delivery in zip(candidates, deliveries, strict=True):
            if replica in members:
                replica.planned = delivery
            else:
                delivery.skip()
        generations = [replica.generation for replica in members]
        self._proposed = Transaction(source, generations, self._config.late_quorum)
        self._proposed_at = self._clock()
        if self._straggler_wait is not None:
            self._straggler_wait.cancel()
            self._straggler_wait = None
        if self._offered is source:  # a newer one may have come while this one was staged
            self._offered = None

    async def _conclude(self) -> None:
        transaction = self._proposed
        assert transaction is not None
        if transaction.phase is Phase.COMMITTED:
            # From now on joiners get this version. The queue learns of it only now, when engines serve it.
            # The first says that the fleet serves; one line for each step would fill the log.
            level = logging.INFO if self._committed is None else logging.DEBUG
            self._committed = transaction
            self._pace_s = self._clock() - self._begun_at
            await self._on_committed(transaction.version)
            logger.log(level, "version %s is committed", transaction.version)
        self._proposed = None

    def _candidates(self) -> list[Replica]:
        """Members of a version that is proposed now.

        A replica that does not serve the committed version yet is no member: it follows later.
        """
        committed = self._committed.version if self._committed else None
        return [
            replica
            for replica in self._replicas.values()
            if replica.state is not ReplicaState.OUT
            and (committed is None or replica.version == committed)
        ]

    @property
    def _may_propose(self) -> bool:
        """A version is offered, and no replica takes part in the one before."""
        proposed = self._proposed
        return self._offered is not None and (proposed is None or proposed.phase is Phase.PARKED)

    @property
    def _finished(self) -> bool:
        """The proposed version is committed or dropped."""
        done = (Phase.COMMITTED, Phase.DROPPED)
        return self._proposed is not None and self._proposed.phase in done

    @property
    def _busy(self) -> bool:
        """Something is in transfer, or about to be."""
        proposed = self._proposed
        parked = proposed is None or proposed.phase is Phase.PARKED
        return self._offered is not None or not parked

    async def _wait_until(self, condition: Callable[[], bool]) -> None:
        async with self._changed:
            await self._changed.wait_for(condition)

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()
