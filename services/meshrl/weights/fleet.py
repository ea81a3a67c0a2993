"""The fleet as other processes see it: its types, their protobuf form, and the calls that fetch it and part with one.

Reports come over the streams on which the replicas have joined: no caller of `Fleet` goes to a replica itself.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import StrEnum

import grpc

from meshrl.contract import codec
from meshrl.contract.stage_worker import StageStats
from meshrl.contract.types import EngineStats, Version
from meshrl.rollout.ports import WorkerReport
from meshrl.rpc import tls
from meshrl.rpc.errors import MAX_TEXT, from_rpc
from meshrl.rpc.transport import CHANNEL_OPTIONS
from meshrl.v1 import weights_pb2 as pb
from meshrl.v1 import weights_pb2_grpc as rpc


class ReplicaState(StrEnum):
    """The state of a replica."""

    JOINING = "joining"
    """Has no weights of this trainer yet."""
    SYNCED = "synced"
    """Holds a verified version beside its engine."""
    SERVING = "serving"
    """Its engine serves a committed version."""
    SUSPECT = "suspect"
    """Half of a deadline has passed without progress."""
    OUT = "out"
    """Died, hung or left; joins again as a new generation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaReport:
    """The state of a worker and its engine at one instant."""

    engine: EngineStats
    worker: WorkerReport


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaView:
    """One replica at one instant."""

    name: str
    state: ReplicaState
    generation: int
    version: Version | None
    """What its engine serves."""
    last_sync_s: float
    """From the proposal of its last version until its engine served it."""
    pause_s: float
    """Seconds that the last update paused its generation."""
    reason: str
    """Why it is out."""
    carrier: str = ""
    """The carrier of its last version, or of the one in transfer."""
    moved_bytes: int = 0
    """What travelled of its last version; less than the version where its carrier sends what changed."""
    report: ReplicaReport | None = None
    """Its last report; None when it has sent none yet, or is out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetView:
    """The fleet at one instant."""

    run: str
    epoch: int
    committed: Version | None
    proposed: Version | None
    replicas: tuple[ReplicaView, ...]


async def fetch_fleet(trainer: str, deadline_s: float) -> FleetView:
    """Ask the trainer's process at `host:port`. Raises UnavailableError when it cannot be reached."""
    async with _weights(trainer) as stub:
        return decode_fleet(await stub.Fleet(pb.FleetRequest(), timeout=deadline_s))


async def drain_replica(trainer: str, replica: str, deadline_s: float) -> None:
    """Have a replica hand over its running rows and end; returns at once.

    Raises:
        NotFoundError: no replica of this name is in the fleet. UnavailableError: the trainer cannot be reached.
    """
    async with _weights(trainer) as stub:
        await stub.Drain(pb.DrainRequest(replica=replica), timeout=deadline_s)


@asynccontextmanager
async def _weights(trainer: str) -> AsyncIterator[rpc.WeightsStub]:
    """The coordinator in the trainer's process at `host:port`; its refusals are raised again."""
    async with tls.channel(trainer, CHANNEL_OPTIONS) as channel:
        try:
            yield rpc.WeightsStub(channel)
        except grpc.aio.AioRpcError as error:
            raise from_rpc(error, f"the trainer at {trainer}") from error


def encode_report(report: ReplicaReport) -> pb.ReplicaReport:
    """The protobuf form."""
    worker = report.worker
    return pb.ReplicaReport(
        engine=codec.ENGINE_STATS.encode(report.engine),
        held=worker.held,
        slots=worker.slots,
        leased=worker.rows.leased,
        written=worker.rows.written,
        failed=worker.rows.failed,
        returned=worker.rows.returned,
        lost=worker.rows.lost,
        breaker=worker.breaker,
        error_rate=worker.error_rate,
        last_fault=codec.printable(worker.last_fault[:MAX_TEXT]),
        opened=worker.opened,
        continued=worker.continued,
        draining=worker.draining,
    )


def decode_report(message: pb.ReplicaReport) -> ReplicaReport:
    """The inverse of `encode_report`. Raises UserError for what is no report."""
    rows = StageStats(
        leased=message.leased,
        written=message.written,
        failed=message.failed,
        returned=message.returned,
        lost=message.lost,
    )
    worker = WorkerReport(
        held=message.held,
        slots=message.slots,
        rows=rows,
        breaker=message.breaker[:MAX_TEXT],
        error_rate=message.error_rate,
        last_fault=message.last_fault[:MAX_TEXT],
        opened=message.opened,
        continued=message.continued,
        draining=message.draining,
    )
    return ReplicaReport(engine=codec.ENGINE_STATS.decode(message.engine), worker=worker)


def encode_fleet(fleet: FleetView) -> pb.FleetResponse:
    """The protobuf form."""
    return pb.FleetResponse(
        run=fleet.run,
        epoch=fleet.epoch,
        committed=_text(fleet.committed),
        proposed=_text(fleet.proposed),
        replicas=[
            pb.ReplicaInfo(
                replica=view.name,
                state=pb.ReplicaState.Value(f"REPLICA_STATE_{view.state.name}"),
                generation=view.generation,
                version=_text(view.version),
                last_sync_s=view.last_sync_s,
                pause_s=view.pause_s,
                reason=view.reason,
                carrier=view.carrier,
                moved_bytes=view.moved_bytes,
                report=encode_report(view.report) if view.report else None,
            )
            for view in fleet.replicas
        ],
    )


def decode_fleet(message: pb.FleetResponse) -> FleetView:
    """The inverse of `encode_fleet`."""
    return FleetView(
        run=message.run,
        epoch=message.epoch,
        committed=_version(message.committed),
        proposed=_version(message.proposed),
        replicas=tuple(
            ReplicaView(
                name=info.replica,
                state=ReplicaState[pb.ReplicaState.Name(info.state).removeprefix("REPLICA_STATE_")],
                generation=info.generation,
                version=_version(info.version),
                last_sync_s=info.last_sync_s,
                pause_s=info.pause_s,
                reason=info.reason,
                carrier=info.carrier,
                moved_bytes=info.moved_bytes,
                report=decode_report(info.report) if info.HasField("report") else None,
            )
            for info in message.replicas
        ),
    )


def _text(version: Version | None) -> str:
    return "" if version is None else str(version)


def _version(text: str) -> Version | None:
    return Version.parse(text) if text else None
