"""Beside each engine: joins the trainer's weight coordinator, receives versions, switches the engine on COMMIT.

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

import grpc

from meshrl.config.weights import WeightsConfig
from meshrl.contract.errors import (
    CorruptError,
    FencedError,
    InfraError,
    MeshError,
    UnavailableError,
    UserError,
    from_detail,
)
from meshrl.contract.ports import WeightSink
from meshrl.contract.types import OnUpdate, Version
from meshrl.v1 import weights_pb2 as pb
from meshrl.weights.carrier import Carriers, LoadCarrier, RunPaths, host_id
from meshrl.weights.fleet import ReplicaReport, encode_report
from meshrl.weights.lora_merging import Merger
from meshrl.weights.messages import stamp, stream_to_coordinator
from meshrl.weights.session import Session
from meshrl.weights.waiting import first_ends, within

logger = logging.getLogger(__name__)
_FIRST_RETRY_S, _LAST_RETRY_S = 0.1, 5.0


class PoisonedError(InfraError):
    """The engine failed while it switched weights: what it serves is unknown, so its process must end."""


class ReplicaController:
    """Keeps one engine at the fleet's version, from the start to the end of `run`."""

    def __init__(
        self,
        config: WeightsConfig,
        *,
        run: str,
        replica: str,
        engine: WeightSink,
        on_update: OnUpdate,
        paths: RunPaths,
        connect: Callable[[], grpc.aio.Channel],
        drain_s: float = 0.0,
        pause_s: Callable[[], float] | None = None,
        report: Callable[[], ReplicaReport] | None = None,
        leave: Callable[[], None] = lambda: None,
        load: LoadCarrier | None = None,
    ) -> None:
        """Nothing happens before `run`.

        Args:
            config: the recipe's `weights`.
            run: the training run.
            replica: this process's name in the fleet, the same after a restart.
            engine: receives the weights.
            on_update: what happens to running generations at a commit.
            paths: the run's directory as this process sees it, and the model.
            connect: makes a new gRPC channel to the trainer's process.
            drain_s: how long running requests may keep a drained commit waiting.
            report: how this worker and its engine do, for `meshrl fleet`.
            leave: begins to end this process, as SIGTERM does; for `meshrl fleet drain`.
            load: makes the carriers; None: `load_carrier`.
            pause_s: seconds that the last update paused generation; None takes the duration of the commit.
        """
        self._config = config
        self._run = run
        self._replica = replica
        self._engine = engine
        self._on_update = on_update
        self._connect = connect
        self._commit_s = config.commit_s + (drain_s if on_update is OnUpdate.DRAIN else 0.0)
        self._pause_s = pause_s
        self._own_report = report
        self._leave = leave
        self._carriers = Carriers(config, paths, load)
        self._merger = Merger(paths.model_path)
        self._highest_epoch = 0
        self._version: Version | None = None
        self._first_commit = asyncio.Event()
        self._committing: asyncio.Task[None] | None = None
        self._retry_s = _FIRST_RETRY_S
        self._welcomed = False
        """The trainer is there: what fails now is no lost connection."""
        self._last_kind, self._same = "", 0
        """Why the last joining ended, and how often in a row."""

    @property
    def version(self) -> Version | None:
        """What the engine serves; None before the first commit."""
        return self._version

    async def serving(self) -> None:
        """Return once the engine serves a committed version; only then may it be given work."""
        await self._first_commit.wait()

    async def run(self) -> None:
        """Join, and join again whenever the trainer is lost, until cancelled.

        Raises:
            UserError: the weights do not fit the engine's model, or this process belongs to another run.
            PoisonedError: the engine broke during a commit.
        """
        try:
            await asyncio.to_thread(self._carriers.load)
            while True:
                try:
                    await self._join_once()
                except (UserError, PoisonedError):
                    raise
                except MeshError as error:
                    self._report(error)
                if self._committing is not None:  # the stream ended, the switch goes on
                    await self._committing
                # Half of it random: the replicas of a fleet must not all come back at the same moment.
                await asyncio.sleep(self._retry_s * random.uniform(0.5, 1.0))
                self._retry_s = min(2 * self._retry_s, _LAST_RETRY_S)
        finally:
            if self._committing is not None:
                self._committing.cancel()
                await asyncio.gather(self._committing, return_exceptions=True)
            await self._carriers.close()

    def _report(self, error: MeshError) -> None:
        """Log why a joining ended. A reason that repeats while the trainer is there is not retried in silence."""
        kind = re.sub(r"\d+", "", str(error))  # versions, sizes and addresses may differ
        self._same = self._same + 1 if kind == self._last_kind else 1
        self._last_kind = kind
        if not self._welcomed or self._same == 1:
            # Logged once, not at every attempt: a trainer that restarts takes many of them.
            level = logging.INFO if self._retry_s == _FIRST_RETRY_S else logging.DEBUG
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
            session = Session(
                self._config,
                welcome=welcome,
                stream=stream,
                carriers=self._carriers,
                engine=self._engine,
                version=lambda: self._version,
                commit=self._commit,
                merger=self._merger,
                leave=self._leave,
            )
            try:
                await first_ends(
                    session.run(),
                    stream.read_loop(generation, session.inspect),
                    stream.heartbeat_loop(
                        lambda: self._sign_of_life(generation), welcome.welcome.beat_s
                    ),
                )
            except MeshError as error:
                if session.failure is None:
                    raise
                raise _reason(error, session.failure) from error
            finally:
                await session.close()
        finally:
            await channel.close(None)

    def _hello(self) -> pb.ReplicaMessage:
        hello = pb.ReplicaHello(
            replica=self._replica,
            highest_epoch=self._highest_epoch,
            serving=self._version is not None,
            commit_deadline_s=self._commit_s,
            host=host_id(),
            carriers=self._carriers.names,
        )
        return pb.ReplicaMessage(stamp=stamp(self._run, 0, self._version), hello=hello)

    def _sign_of_life(self, generation: int) -> pb.ReplicaMessage:
        about = stamp(self._run, generation, None)
        if self._own_report is None:
            return pb.ReplicaMessage(stamp=about, beat=pb.Beat())
        return pb.ReplicaMessage(stamp=about, report=encode_report(self._own_report()))

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

    async def _commit(self, version: Version, nbytes: int) -> float:
        """Switch the engine; returns the seconds that generation was paused.

        A switch that has begun is finished even if the stream ends meanwhile: an engine is never left between
        two versions.

        Raises:
            PoisonedError: the engine failed, or took longer than its deadline.
        """
        clock = asyncio.get_running_loop().time
        began = clock()
        self._committing = asyncio.create_task(self._switch(version, nbytes))
        await asyncio.shield(self._committing)
        return self._pause_s() if self._pause_s is not None else clock() - began

    async def _switch(self, version: Version, nbytes: int) -> None:
        try:
            switch = self._engine.commit_weights(version, self._on_update)
            deadline_s = self._commit_s + self._config.switch_s(nbytes)
            await within(switch, deadline_s, f"commit of weights {version}")
        except Exception as error:
            raise PoisonedError(f"the engine failed at weights {version}: {error!r}") from error
        self._version = version
        self._retry_s = _FIRST_RETRY_S
        self._last_kind = ""
        self._first_commit.set()


def _reason(ended: MeshError, failure: MeshError) -> MeshError:
    """Why a joining is over in which this side failed: `failure`, which is more precise than the answer `ended`.

    Only a trainer that answers can refuse this process for good: what a dead one had proposed may be gone with it.
    """
    answered = ended is not failure and isinstance(ended, UserError)
    if isinstance(failure, UserError) and not answered:
        return UnavailableError(f"the trainer is gone, or does not answer this: {failure}")
    return failure
