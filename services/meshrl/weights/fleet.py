"""The fleet as other processes see it: its types, their protobuf form, and the calls that fetch it and part with one.

Reports come over the streams on which the replicas have joined: no caller of `Fleet` goes to a replica itself.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from typing import Any, Final

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
    """No weights of this trainer yet."""
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
    """The version that its engine serves."""
    last_sync_s: float
    """Seconds from the proposal of its last version until its engine served it."""
    pause_s: float
    """Seconds that the last update paused its generation."""
    reason: str
    """Why it is out."""
    carrier: str = ""
    """The carrier of its last version, or of the one in transfer."""
    moved_bytes: int = 0
    """Bytes sent for its last version; fewer than the version has where its carrier sends changes."""
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
        return FLEET.decode(await stub.Fleet(pb.FleetRequest(), timeout=deadline_s))


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


def _worker_fields(worker: WorkerReport) -> dict[str, object]:
    found = asdict(worker)
    texts = {name: codec.printable(found[name][:MAX_TEXT]) for name in ("last_fault", "waits_for")}
    return {**found.pop("rows"), **found, **texts}


def _worker(message: pb.ReplicaReport) -> WorkerReport:
    def read(kind: type) -> dict[str, Any]:
        found = {each.name: getattr(message, each.name, None) for each in fields(kind)}
        return {
            name: value[:MAX_TEXT] if isinstance(value, str) else value
            for name, value in found.items()
        }

    return WorkerReport(**{**read(WorkerReport), "rows": StageStats(**read(StageStats))})


_VERSION = codec.Field(str, lambda text: Version.parse(text) if text else None)
"""`epoch.step`; empty when there is none."""
REPLICA_REPORT: Final = codec.Codec(
    ReplicaReport,
    pb.ReplicaReport,
    given={"worker": codec.Field(_worker_fields, _worker, spread=True)},
)
REPLICA_VIEW: Final = codec.Codec(
    ReplicaView,
    pb.ReplicaInfo,
    given={"name": codec.Field(name="replica"), "reason": codec.TEXT, "version": _VERSION},
)
FLEET: Final = codec.Codec(
    FleetView, pb.FleetResponse, given={"committed": _VERSION, "proposed": _VERSION}
)
