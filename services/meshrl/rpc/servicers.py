"""Serves ports over gRPC: what their tables do not say, streams above all. The .proto files describe each method."""
# ruff: noqa: D102

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import aclosing, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Final, Protocol, TypeVar

import grpc
from google.protobuf.message import Message
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from meshrl.contract import codec, types
from meshrl.contract.codec.bulk import TAKES_COMPRESSED
from meshrl.contract.errors import MeshError, NotFoundError
from meshrl.contract.ports import HeartbeatQueue, Judge
from meshrl.contract.types import EngineStats, TrainerPhase, TrainerStatus
from meshrl.rollout.containers.pool import Pool
from meshrl.rpc.clients.operators import (
    CASE,
    KINDS,
    NAME,
    SUBMISSION,
    QueueAdminTable,
    RewardRegistryTable,
)
from meshrl.rpc.clients.queue import QueueTable
from meshrl.rpc.clients.services import RewardTable, RolloutTable, TrainerTable, TrainingTable
from meshrl.rpc.credentials import MeshRole, role_of_stage
from meshrl.rpc.identity import CALLER, caller_of_quota, require, served_stages
from meshrl.rpc.interceptors import ANSWERED, Context, bounded, collected
from meshrl.rpc.methods import MethodTable
from meshrl.transferqueue.store import FORMAT, Operation, Table
from meshrl.v1 import queue_admin_pb2, queue_pb2, reward_pb2, reward_registry_pb2, trainer_pb2
from meshrl.v1.trajectory_pb2 import Ack

if TYPE_CHECKING:  # each service needs its own of these rooms only
    from meshrl.rewardd.registry.active_reward import ActiveRewardJudge
    from meshrl.rewardd.registry.registry import Registry
    from meshrl.rpc.audit_log import AuditedChanges
    from meshrl.transferqueue.admin import QueueAdmin


FETCH_BYTES: Final = 16 << 20
"""Payload of one piece of an answer to Fetch, by the size of the groups before it."""
FIRST_GROUPS: Final = 4
"""Groups of its first piece, whose size is not known."""


class TableServicer:
    """Calls a port's methods with the fields of requests.

    A method that a subclass has, by its name in the .proto, is called instead:

        class TrainerServicer(TableServicer, table=TrainerTable): …
    """

    table: ClassVar[type[MethodTable]]
    service: ClassVar[str]
    """Full name."""
    waits: ClassVar[frozenset[str]]
    """Names of methods that may wait long."""

    def __init_subclass__(cls, *, table: type[MethodTable] | None = None, **more: Any) -> None:
        super().__init_subclass__(**more)
        if table is not None:
            cls.table = table
            cls.service = table.service.full_name
            cls.waits = frozenset(name for name, each in table.methods.items() if each.row.waits)

    def __init__(self, *ports: Any) -> None:
        """A method is called on the first of `ports` that has it."""
        self._ports = ports

    def attach(self, server: grpc.aio.Server) -> None:
        """Register the methods with `server`."""
        handlers = {
            name: getattr(grpc, f"{method.arity}_rpc_method_handler")(
                getattr(self, name, None) or partial(self.answer, name),
                request_deserializer=method.ask.parse,
                response_serializer=method.answer.serialize,
            )
            for name, method in self.table.methods.items()
        }
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(self.service, handlers),)
        )

    async def answer(self, name: str, request: Any, context: Context) -> Any:
        """Call the port's method of a row with the request's fields; return its answer as the row converts it."""
        return self.table.methods[name].encode_answer(await self.call(name, request))

    async def call(self, name: str, request: Any, **more: Any) -> Any:
        """The answer of the port's method of a row, called with the request's fields and `more`."""
        method = self.table.methods[name]
        assert method.row.port is not None, (
            f"{method.path} has neither a port's method nor one here"
        )
        if method.of_stage:
            require_stage(request.stage)
        arguments = method.decode_arguments(request)
        if method.polls:
            arguments["wait_s"] = bounded(request.wait_s)
        called = method.row.port.__name__
        port = next(each for each in self._ports if hasattr(each, called))
        answer = getattr(port, called)(**arguments, **more)
        return await answer if inspect.isawaitable(answer) else answer


M = TypeVar("M", bound=Message)


def require_stage(stage: str) -> None:
    """Raises ForbiddenError unless the caller serves the stage, or is the operator, or nobody is asked."""
    if roles := CALLER.get().roles:
        require(f"stage {stage[:80]!r}", {role_of_stage(stage), MeshRole.OPERATOR}, roles)


class QueueServicer(TableServicer, table=QueueTable):
    """Streams, and whose quota and stages a call is for."""

    def __init__(self, queue: HeartbeatQueue) -> None:
        super().__init__(queue)
        self._queue = queue

    async def OpenRun(
        self, request: queue_pb2.OpenRunRequest, context: Context
    ) -> queue_pb2.RunState:
        spec = codec.RUN_SPEC.decode(request.spec)
        state = await self._queue.open_run(spec, caller=caller_of_quota())
        return codec.RUN_STATE.encode(state)

    async def Admit(
        self, request_iterator: AsyncIterator[queue_pb2.AdmitRequest], context: Context
    ) -> queue_pb2.AdmitResponse:
        header, tasks = codec.decode_admit(await collected(request_iterator))
        admitted = await self._queue.admit(
            header.run, tasks, cursor=header.cursor, wait_s=bounded(header.wait_s)
        )
        return queue_pb2.AdmitResponse(admitted=admitted)

    async def Lease(
        self, request: queue_pb2.LeaseRequest, context: Context
    ) -> AsyncIterator[codec.Bulk[queue_pb2.LeaseResponse]]:
        """Rows whose answer is not sent go back untouched; none are leased where there is no room for the answer."""
        lease: types.Lease = await self.call("Lease", request, reserve=ANSWERED.get())
        unsent = True
        try:
            for message in self._bulk(codec.encode_lease(lease), context):
                yield message
            unsent = False
        finally:
            if unsent:
                with suppress(
                    MeshError
                ):  # the run is removed, or the queue closes: nobody holds them
                    await self._queue.release(lease.run, lease.stage, lease.token_of())

    async def Attend(
        self, request: queue_pb2.AttendRequest, context: Context
    ) -> AsyncIterator[Ack]:
        with self._queue.heartbeat(request.worker, serves=served_stages()):
            yield Ack()
            await asyncio.get_running_loop().create_future()

    async def Write(
        self, request_iterator: AsyncIterator[codec.Bulk[queue_pb2.WriteRequest]], context: Context
    ) -> Ack:
        header, blocks = codec.decode_write(await collected(request_iterator))
        require_stage(header.stage)
        await self._queue.write(header.run, header.stage, blocks)
        return Ack()

    async def Append(
        self, request_iterator: AsyncIterator[codec.Bulk[queue_pb2.WriteRequest]], context: Context
    ) -> Ack:
        header, blocks = codec.decode_write(await collected(request_iterator))
        require_stage(header.stage)
        await self._queue.append(header.run, header.stage, blocks)
        return Ack()

    async def Fetch(
        self, request: queue_pb2.FetchRowsRequest, context: Context
    ) -> AsyncIterator[codec.Bulk[queue_pb2.FetchRowsResponse]]:
        """Read and send piece by piece: a caller that does not read keeps one piece in memory."""
        asked = codec.decode_rows(request.rows)
        columns = list(request.columns)
        answered = ANSWERED.get()
        done, count = 0, FIRST_GROUPS
        while not done or done < len(asked):
            piece = asked[done : done + count]
            blocks = await self._queue.fetch(request.run, piece, columns, reserve=answered)
            nbytes = sum(len(frame.value) for block in blocks for frame in block.frames)
            announced = 0 if done else len(asked)
            for message in self._bulk(codec.encode_fetched(blocks, announced), context):
                yield message
            answered.end()
            done += max(1, len(piece))
            count = min(8 * count, max(1, count * FETCH_BYTES // max(1, nbytes)))

    @staticmethod
    def _bulk(messages: Iterable[codec.Bulk[M]], context: Context) -> Iterator[codec.Bulk[M]]:
        """Compress the frames if the caller accepts that."""
        if TAKES_COMPRESSED in (context.invocation_metadata() or ()):
            return (message.compressed() for message in messages)
        return iter(messages)


PIECE_BYTES: Final = 1 << 20
"""Bytes of one message. In larger messages protobuf's copies cost more than they save."""


class QueueAdminServicer(TableServicer, table=QueueAdminTable):
    """The stream of a backup."""

    def __init__(self, admin: QueueAdmin) -> None:
        super().__init__(admin)
        self._admin = admin

    async def Backup(
        self, request: queue_admin_pb2.BackupRequest, context: Context
    ) -> AsyncIterator[queue_admin_pb2.BackupPiece]:
        async with aclosing(self._admin.export()) as pieces:
            async for piece in pieces:
                for message in encode_piece(piece):
                    yield message


def encode_piece(piece: Sequence[Operation]) -> Iterator[queue_admin_pb2.BackupPiece]:
    """Messages of about PIECE_BYTES. A larger value is cut into several."""
    message = queue_admin_pb2.BackupPiece(format=FORMAT)
    size = 0
    for table, key, value in piece:
        assert value is not None
        for at in range(0, max(1, len(value)), PIECE_BYTES):
            part = value[at : at + PIECE_BYTES]
            message.records.add(
                payload=table is Table.PAYLOAD,
                key=key,
                value=part,
                continues=at + PIECE_BYTES < len(value),
            )
            size += len(key) + len(part)
            if size >= PIECE_BYTES:
                yield message
                message, size = queue_admin_pb2.BackupPiece(format=FORMAT), 0
    if message.records:
        yield message


class RewardServicer(TableServicer, table=RewardTable):
    """Translates and delegates."""

    def __init__(self, judge: Judge, versions: ActiveRewardJudge | None = None) -> None:
        super().__init__(judge)
        self._judge = judge
        self._versions = versions

    async def Score(
        self, request: reward_pb2.ScoreRequest, context: Context
    ) -> reward_pb2.ScoreResponse:
        samples = [codec.SAMPLE.decode(sample) for sample in request.samples]
        scores = await self._score(request.reward_hash, samples)
        return reward_pb2.ScoreResponse(scores=map(codec.SCORE.encode, scores))

    async def GetInfo(
        self, request: reward_pb2.GetRewardInfoRequest, context: Context
    ) -> reward_pb2.RewardInfo:
        return reward_pb2.RewardInfo(reward_hash=self._judge.reward_hash)

    async def _score(self, version: str, samples: list[types.Sample]) -> Iterable[types.Score]:
        if not version or version == self._judge.reward_hash:
            return await self._judge.score(samples)
        if self._versions is None:
            raise NotFoundError(f"this judge is version {self._judge.reward_hash}, not {version}")
        return await self._versions.score_with(version, samples)


class RewardRegistryServicer(TableServicer, table=RewardRegistryTable):
    """The answers that hold several things. What changes something is audited, so `changes` goes before."""

    def __init__(self, registry: Registry, changes: AuditedChanges) -> None:
        super().__init__(changes, registry)
        self._registry = registry
        self._changes = changes
        self.http_address = ""
        """Address of the HTTP server; empty while there is none."""

    async def SubmitReward(
        self, request: reward_registry_pb2.SubmitRewardRequest, context: Context
    ) -> reward_registry_pb2.SubmitRewardResponse:
        submission = SUBMISSION.decode(request)
        accepted = await self._changes.submit(submission)
        return reward_registry_pb2.SubmitRewardResponse(
            hash=accepted.manifest.hash,
            created=accepted.created,
            cases=accepted.cases,
            name=NAME.encode(accepted.name),
        )

    async def ListRewards(
        self, request: reward_registry_pb2.ListRewardsRequest, context: Context
    ) -> reward_registry_pb2.RewardNames:
        listing = self._registry.listing()
        return reward_registry_pb2.RewardNames(
            names=map(NAME.encode, listing.names),
            followed=listing.followed,
            scoring=listing.scoring,
            base=listing.base,
            http_address=self.http_address,
        )

    async def GetReward(
        self, request: reward_registry_pb2.RewardRef, context: Context
    ) -> reward_registry_pb2.RewardVersion:
        manifest, content, cases = self._registry.version(request.name, request.version)
        return reward_registry_pb2.RewardVersion(
            name=request.name,
            hash=manifest.hash,
            entry_point=manifest.entry_point,
            kind=KINDS.number_of[manifest.kind],
            deps=manifest.deps,
            content=content,
            is_wheel=manifest.is_wheel,
            limits=manifest.limits,
            cases=map(CASE.encode, cases),
        )


class Telling(Protocol):
    """The part of an Engine that callers may use. Its rows come from the queue, its weights from the weight plane."""

    def stats(self) -> EngineStats: ...


class RolloutServicer(TableServicer, table=RolloutTable):
    """The statistics of an engine."""


class TrainingServicer(TableServicer, table=TrainingTable):
    """The port of callers' models."""


class EngineCollector(Collector):
    """Prometheus metrics of how an engine takes new weights, read at each scrape."""

    def __init__(self, engine: Telling) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        """Two gauges."""
        stats = self._engine.stats()
        yield GaugeMetricFamily(
            "meshrl_engine_update_pause_seconds",
            "How long the last update of the weights held generation up.",
            value=stats.update_pause_s,
        )
        staging = GaugeMetricFamily(
            "meshrl_engine_weights_staging",
            "1 for where the last version of the weights waited for its commit.",
            labels=["staging"],
        )
        for where in ("device", "host"):
            staging.add_metric([where], float(stats.staging == where))
        yield staging


class BoxCollector(Collector):
    """Prometheus metrics of a worker's containers, read at each scrape."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def collect(self) -> Iterator[Metric]:
        """One gauge, five counters."""
        stats = self._pool.stats
        yield GaugeMetricFamily(
            "meshrl_boxes", "Containers of rows that run.", value=self._pool.running
        )
        for name, told, value in (
            ("started", "Containers started.", stats.started),
            ("warm", "Containers that were there when a row wanted one.", stats.warm),
            ("failed", "Images that could not be made, and starts that failed.", stats.failed),
            ("start_seconds", "Seconds of all starts of containers together.", stats.start_s),
            ("wait_seconds", "Seconds that rows waited for their containers.", stats.wait_s),
        ):
            yield CounterMetricFamily(f"meshrl_boxes_{name}", told, value=value)


class StatusTelling(Protocol):
    """The state of a trainer, for its watchers."""

    def status(self) -> TrainerStatus: ...

    def watch(self, every_s: float) -> AsyncGenerator[TrainerStatus, None]: ...


class TrainerServicer(TableServicer, table=TrainerTable):
    """The stream of statuses."""

    def __init__(self, trainer: StatusTelling) -> None:
        super().__init__(trainer)
        self._trainer = trainer

    async def Watch(
        self, request: trainer_pb2.WatchTrainerRequest, context: Context
    ) -> AsyncIterator[trainer_pb2.TrainerStatus]:
        every_s = max(1.0, bounded(request.every_s))
        async with aclosing(self._trainer.watch(every_s)) as statuses:
            async for status in statuses:
                yield codec.TRAINER_STATUS.encode(status)


TIME = "time/unix_s"
MANY = re.compile(r"mismatch/(version|replica)_")
"""Metrics whose names change from step to step: a series for each would never end."""


class TrainerCollector(Collector):
    """Reads the trainer's status at each scrape, in the thread of the metrics' HTTP server."""

    def __init__(self, run: str, look: Callable[[], TrainerStatus]) -> None:
        self._run = run
        self._look = look

    def describe(self) -> list[Metric]:
        """No metric is known before the first step."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Read all metrics."""
        status, labels = self._look(), [self._run]
        step = GaugeMetricFamily("meshrl_trainer_step", "Optimizer steps done.", labels=["run"])
        step.add_metric(labels, status.step)
        phase = GaugeMetricFamily(
            "meshrl_trainer_phase", "1 for what it does now.", labels=["run", "phase"]
        )
        for each in TrainerPhase:
            phase.add_metric([*labels, each.value], float(each is status.phase))
        yield from (step, phase)
        if TIME in status.metrics:
            made = GaugeMetricFamily(
                "meshrl_trainer_step_made_seconds",
                "When the newest step ended, in seconds since 1970.",
                labels=["run"],
            )
            made.add_metric(labels, status.metrics[TIME])
            yield made
        training = GaugeMetricFamily(
            "meshrl_training",
            "Metrics of the newest step, as in metrics.jsonl.",
            labels=["run", "metric"],
        )
        for name, value in status.metrics.items():
            if name != TIME and not MANY.match(name):
                training.add_metric([*labels, name], value)
        if status.held_out_score is not None:
            training.add_metric([*labels, "val/score/mean"], status.held_out_score)
        yield training
