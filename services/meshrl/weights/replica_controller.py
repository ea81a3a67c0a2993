"""The replica of an engine: joins the trainer's weight coordinator, receives versions, switches on COMMIT.

Consumes the coordinator's messages. Waits for them, for at most `silence_s` without a heartbeat, and for bytes, under
the carrier's deadlines. Unblocked by a message or by the end of the stream; then it joins again, for as long as it
runs. Produces verified versions staged beside the engine and, only on COMMIT, an engine that serves them.
"""

from __future__ import annotations

import asyncio
import logging
import random
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import grpc

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
from meshrl.contract.ports import AdapterSink, LendingSink, LocatedSink, WeightSink
from meshrl.contract.types import OnUpdate, Version, WeightManifest
from meshrl.rpc.errors import DRAINING
from meshrl.v1 import weights_pb2 as pb
from meshrl.weights.carrier import Link, host_id
from meshrl.weights.fleet import REPLICA_REPORT, ReplicaReport
from meshrl.weights.messages import (
    CoordinatorStream,
    manifest_from_message,
    stamp,
    stamped_version,
    stream_to_coordinator,
)
from meshrl.weights.receiving import Arrival, Merger
from meshrl.weights.transport import ReceivePlan, Transport
from meshrl.weights.waiting import first_ends, within

logger = logging.getLogger(__name__)
_FIRST_RETRY_S, _LAST_RETRY_S = 0.1, 5.0
_CLOSING_S = 2.0


class PoisonedError(InfraError):
    """The engine failed while it switched weights: what it serves is unknown, so its process must end."""


class ServedEngine:
    """The engine of this process: versions are staged beside the one that it serves, then it switches."""

    def __init__(
        self,
        sink: WeightSink,
        config: WeightsConfig,
        *,
        on_update: OnUpdate = OnUpdate.IN_FLIGHT,
        model_path: Path | None = None,
        drain_s: float = 0.0,
        pause_s: Callable[[], float] | None = None,
    ) -> None:
        """Nothing happens before a version comes.

        Args:
            sink: receives the weights.
            config: the recipe's `weights`.
            on_update: what happens to running generations at a commit.
            model_path: the checkpoint that adapters are merged into; None: adapters are refused.
            drain_s: how long running requests may keep a drained commit waiting.
            pause_s: seconds that the last update paused generation; None takes the duration of the commit.
        """
        self.sink = sink
        self.version: Version | None = None
        """The version that it serves; None before the first commit."""
        self.first_commit = asyncio.Event()
        self.on_switch: Callable[[], None] = lambda: None
        """Called when it has switched."""
        self.commit_s = config.commit_s + (drain_s if on_update is OnUpdate.DRAIN else 0.0)
        self._config = config
        self._on_update = on_update
        self._pause_s = pause_s
        self._merger = Merger(model_path)
        self._staged: tuple[Version, int] | None = None
        """The staged version and its bytes."""
        self._switching: asyncio.Task[None] | None = None

    async def stage(self, arrival: Arrival) -> WeightManifest:
        """Give a version that has come whole to the engine; what it will serve. Raises MeshError."""
        buckets, manifest = arrival.buckets, arrival.hashed
        self._staged = manifest.version, 0
        served = manifest.served
        if manifest.adapter is not None:
            if isinstance(self.sink, AdapterSink) and self.sink.serves_adapters:
                await asyncio.to_thread(self._merger.base_of, manifest.adapter)
                served = manifest
            else:
                buckets = await asyncio.to_thread(self._merger.merge, manifest, buckets)
        try:
            if arrival.lent:
                assert isinstance(self.sink, LendingSink)
                digests = [arrival.digests[index] for index in range(len(buckets))]
                await self.sink.stage_lent(served, digests)
            else:
                await self.sink.stage_weights(served, buckets)
        except MeshError:
            raise
        except Exception as error:  # an engine's library may raise anything
            raise InfraError(f"staging weights {manifest.version}: {error!r}") from error
        self._staged = manifest.version, served.total_bytes
        return served

    async def discard(self) -> None:
        """Forget what is staged; idempotent."""
        if self._staged is not None:
            (staged, _), self._staged = self._staged, None
            await self.sink.discard_weights(staged)

    async def commit(self, version: Version) -> float:
        """Switch to what is staged; returns the seconds that generation was paused.

        A switch that has begun is finished even if the stream ends meanwhile: an engine is never left between
        two versions.

        Raises:
            ConflictError: the version is not staged.
            PoisonedError: the engine failed, or took longer than its deadline.
        """
        if self.version == version:  # committing twice is committing once
            return 0.0
        if self._staged is None or self._staged[0] != version:
            staged = self._staged and self._staged[0]
            raise ConflictError(f"version {version} should be committed, but {staged} is staged")
        (_, nbytes), self._staged = self._staged, None
        clock = asyncio.get_running_loop().time
        began = clock()
        self._switching = asyncio.create_task(self._switch(version, nbytes))
        await asyncio.shield(self._switching)
        return self._pause_s() if self._pause_s is not None else clock() - began

    async def settled(self) -> None:
        """Return once no switch is under way; raises what ended the last one."""
        if self._switching is not None:
            await self._switching

    async def close(self) -> None:
        """Give up a switch that is under way."""
        if self._switching is not None:
            self._switching.cancel()
            await asyncio.gather(self._switching, return_exceptions=True)

    async def _switch(self, version: Version, nbytes: int) -> None:
        who = self.sink.where if isinstance(self.sink, LocatedSink) else "the engine"
        try:
            switch = self.sink.commit_weights(version, self._on_update)
            deadline_s = self.commit_s + self._config.switch_s(nbytes)
            await within(switch, deadline_s, f"commit of weights {version}")
        except Exception as error:
            raise PoisonedError(f"{who} failed at weights {version}: {error!r}") from error
        self.version = version
        self.first_commit.set()
        self.on_switch()


class ReplicaController:
    """Keeps one engine at the fleet's version, from the start to the end of `run`."""

    def __init__(
        self,
        config: WeightsConfig,
        *,
        run: str,
        replica: str,
        engine: ServedEngine,
        transport: Transport,
        connect: Callable[[], grpc.aio.Channel],
        report: Callable[[], ReplicaReport] | None = None,
        leave: Callable[[], None] = lambda: None,
    ) -> None:
        """Nothing happens before `run`.

        Args:
            config: the recipe's `weights`.
            run: the training run.
            replica: this process's name in the fleet, the same after a restart.
            engine: what versions are for.
            transport: how they come; closed with `run`.
            connect: makes a new gRPC channel to the trainer's process.
            report: how this worker and its engine do, for `meshrl fleet`.
            leave: begins to end this process, as SIGTERM does; for `meshrl fleet drain`.
        """
        self._config = config
        self._run = run
        self._replica = replica
        self._engine = engine
        self._transport = transport
        self._connect = connect
        self._own_report = report
        self._leave = leave
        self._highest_epoch = 0
        self._retry_s = _FIRST_RETRY_S
        self._welcomed = False
        """The trainer is there: what fails now is no lost connection."""
        self._last_kind, self._same = "", 0
        """Why the last joining ended, and how often in a row."""
        engine.on_switch = self._switched

    @property
    def version(self) -> Version | None:
        """The version that the engine serves; None before the first commit."""
        return self._engine.version

    async def serving(self) -> None:
        """Return once the engine serves a committed version; only then may it be given work."""
        await self._engine.first_commit.wait()

    async def run(self) -> None:
        """Join, and join again whenever the trainer is lost, until cancelled.

        Raises:
            UserError: the weights do not fit the engine's model, or this process belongs to another run.
            PoisonedError: the engine broke during a commit.
        """
        try:
            await self._transport.load()
            while True:
                try:
                    await self._join_once()
                except (UserError, PoisonedError):
                    raise
                except MeshError as error:
                    self._report(error)
                await self._engine.settled()  # the stream ended, the switch continues
                # Half of it random: the replicas of a fleet must not all come back at the same moment.
                await asyncio.sleep(self._retry_s * random.uniform(0.5, 1.0))
                self._retry_s = min(2 * self._retry_s, _LAST_RETRY_S)
        finally:
            await self._engine.close()
            await self._transport.close()

    def _report(self, error: MeshError) -> None:
        """Log why a joining ended. A reason that repeats while the trainer is there is not retried in silence."""
        kind = re.sub(r"\d+", "", str(error))  # versions, sizes and addresses may differ
        self._same = self._same + 1 if kind == self._last_kind else 1
        self._last_kind = kind
        if not self._welcomed or self._same == 1:
            # Logged once, not at every attempt: a trainer that restarts takes many of them.
            # A trainer that drains has done its work, or was stopped.
            told = self._retry_s != _FIRST_RETRY_S or str(error).endswith(DRAINING)
            level = logging.DEBUG if told else logging.INFO
            logger.log(level, "%s is not connected to the trainer: %s", self._replica, error)
        elif self._same.bit_count() == 1:  # the 2nd, 4th, 8th, ... time
            logger.warning(
                "%s got no weights, %d times in a row for the same reason: %s; it tries again",
                self._replica,
                self._same,
                error,
            )

    async def _join_once(self) -> None:
        """One joining, from HELLO until the stream ends."""
        self._welcomed = False
        channel = self._connect()
        try:
            stream = stream_to_coordinator(channel, self._config.silence_s)
            await stream.send(self._hello())
            welcome = await stream.read()
            self._check_welcome(welcome)
            self._welcomed = True
            generation = welcome.stamp.generation
            joining = Joining(welcome.stamp, stream, self._engine, self._transport, self._leave)
            try:
                await first_ends(
                    joining.run(),
                    stream.read_loop(generation, joining.inspect),
                    stream.heartbeat_loop(
                        lambda: self._sign_of_life(generation), welcome.welcome.beat_s
                    ),
                )
            except MeshError as error:
                if joining.failure is None:
                    raise
                raise _reason(error, joining.failure) from error
            finally:
                await joining.close()
        finally:
            await channel.close(None)

    def _hello(self) -> pb.ReplicaMessage:
        hello = pb.ReplicaHello(
            replica=self._replica,
            highest_epoch=self._highest_epoch,
            serving=self.version is not None,
            commit_deadline_s=self._engine.commit_s,
            host=host_id(),
            carriers=self._transport.names,
        )
        return pb.ReplicaMessage(stamp=stamp(self._run, 0, self.version), hello=hello)

    def _sign_of_life(self, generation: int) -> pb.ReplicaMessage:
        about = stamp(self._run, generation, None)
        if self._own_report is None:
            return pb.ReplicaMessage(stamp=about, beat=pb.Beat())
        return pb.ReplicaMessage(stamp=about, report=REPLICA_REPORT.encode(self._own_report()))

    def _check_welcome(self, message: pb.PlaneMessage) -> None:
        """Raises FencedError for a trainer whose epoch is over, or the coordinator's reason to refuse."""
        if message.WhichOneof("body") == "abort":
            raise from_detail(message.abort.code, message.abort.message, {})
        if message.WhichOneof("body") != "welcome":
            raise CorruptError(
                f"the trainer's first message is {message.WhichOneof('body') or 'empty'}, not a welcome"
            )
        epoch = message.stamp.epoch
        if epoch < self._highest_epoch:
            raise FencedError(
                f"the trainer's epoch {epoch} is over: {self._highest_epoch} was seen"
            )
        self._highest_epoch = epoch

    def _switched(self) -> None:
        self._retry_s = _FIRST_RETRY_S
        self._last_kind = ""


class Joining:
    """Answers the coordinator, message by message, from the first PROPOSE to the end of the stream.

    What is staged is in the engine; nothing else outlives `close`.
    """

    def __init__(
        self,
        about: pb.WeightStamp,
        stream: CoordinatorStream,
        engine: ServedEngine,
        transport: Transport,
        leave: Callable[[], None],
    ) -> None:
        """`about` is that of the coordinator's WELCOME; `leave` begins to end this process."""
        self._about = about
        self._stream = stream
        self._engine = engine
        self._transport = transport
        self._leave = leave
        self._proposals = 0
        """Proposals that have arrived and wait for the current one."""
        self._proposed = asyncio.Event()
        """One waits."""
        self._arrival: Arrival | None = None
        """The proposed version, until it is staged."""
        self.failure: MeshError | None = None
        """The error on this side, if one ended the joining."""

    def inspect(self, message: pb.PlaneMessage) -> bool:
        """Look at a message as it arrives, whatever this waits for; True if it is answered.

        Raises the reason when the coordinator removes this replica.
        """
        body = message.WhichOneof("body")
        if body == "abort" and message.abort.final:
            raise from_detail(message.abort.code, message.abort.message, {})
        if body == "leave":
            self._leave()
            return True
        if body == "propose":
            self._proposals += 1
            self._proposed.set()
        return False

    async def run(self) -> None:
        """Answer the coordinator's messages, in order, for as long as the stream lasts.

        Raises:
            MeshError: what failed here; the coordinator has been sent it.
        """
        while True:
            # Waits until the next version: `read_loop` has the deadline.
            message = await self._stream.receive()
            version = stamped_version(message.stamp)
            try:
                await self._answer(message, version)
            except MeshError as error:
                self.failure = error
                failed = pb.ReplicaFailed(code=error.code, message=str(error))
                await self._send(version, failed=failed)
                # The coordinator answers by closing the stream; closing it here first would cancel the message.
                await asyncio.sleep(_CLOSING_S)
                raise

    async def close(self) -> None:
        """Discard what is not committed; idempotent."""
        await self._transport.disconnect()
        await self._discard()

    async def _answer(self, message: pb.PlaneMessage, version: Version) -> None:
        match message.WhichOneof("body"):
            case "propose":
                await self._propose(message)
            case "transfer":
                await self._transfer(version, message.transfer)
            case "commit":
                pause_s = await self._engine.commit(version)
                self._transport.committed(version)
                await self._send(version, committed=pb.ReplicaCommitted(pause_s=pause_s))
            case "abort":
                await self._discard()
            case body:
                unknown = body or "nothing"
                raise InfraError(
                    f"the coordinator sent {unknown}, which this process does not know"
                )

    async def _propose(self, message: pb.PlaneMessage) -> None:
        proposal, about = message.propose, self._about
        manifest = manifest_from_message(message.stamp, proposal.manifest)
        version, serving = manifest.version, self._engine.version
        if version.epoch != about.epoch or (serving and version < serving):
            raise FencedError(f"version {version} was proposed to an engine at {serving}")
        self._proposals -= 1
        if not self._proposals:
            self._proposed.clear()
        if self._arrival is None or not self._arrival.is_of(manifest):
            await self._discard()
            say = partial(self._send, version)
            self._arrival = Arrival(manifest, self._engine.sink, say, self._proposed)
        link = Link(
            run=about.run,
            epoch=about.epoch,
            generation=about.generation,
            endpoint=proposal.endpoint,
            group=proposal.group,
            rank=proposal.rank or 1,
            size=proposal.size or 2,
        )
        plan = ReceivePlan(carrier=proposal.carrier, link=link, arrival=self._arrival)
        await self._transport.receive(plan)

    async def _transfer(self, version: Version, transfer: pb.PlaneTransfer) -> None:
        arrival = self._arrival
        if arrival is None or arrival.version != version:
            raise ConflictError(f"buckets of version {version}, which was not proposed")
        if await arrival.take(transfer):
            served = await self._engine.stage(arrival)
            self._arrival = None
            await self._send(version, prepared=pb.ReplicaPrepared(hashes=served.bucket_hashes))

    async def _discard(self) -> None:
        self._arrival = None
        await self._engine.discard()

    async def _send(self, version: Version, **body: object) -> None:
        about = stamp(self._about.run, self._about.generation, version)
        await self._stream.send(pb.ReplicaMessage(stamp=about, **body))  # type: ignore[arg-type]


def _reason(ended: MeshError, failure: MeshError) -> MeshError:
    """Why a joining is over in which this side failed: `failure`, which is more precise than the answer `ended`.

    Only a trainer that answers can refuse this process for ever: the proposal of a dead one may be lost with it.
    """
    answered = ended is not failure and isinstance(ended, UserError)
    if isinstance(failure, UserError) and not answered:
        return UnavailableError(f"the trainer is gone, or does not answer this: {failure}")
    return failure
