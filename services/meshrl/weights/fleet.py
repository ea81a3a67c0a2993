"""The fleet as other processes see it: its types, their protobuf form, and the call that fetches it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import grpc

from meshrl.contract.types import Version
from meshrl.rpc import tls
from meshrl.rpc.errors import from_rpc
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
    address: str = ""
    """Where its own service listens; empty when unknown."""
    moved_bytes: int = 0
    """What travelled of its last version; less than the version where its carrier sends what changed."""


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
    async with tls.channel(trainer, CHANNEL_OPTIONS) as channel:
        try:
            answer = await rpc.WeightsStub(channel).Fleet(pb.FleetRequest(), timeout=deadline_s)
        except grpc.aio.AioRpcError as error:
            raise from_rpc(error, trainer) from error
    return decode_fleet(answer)


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
                address=view.address,
                moved_bytes=view.moved_bytes,
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
                address=info.address,
                moved_bytes=info.moved_bytes,
            )
            for info in message.replicas
        ),
    )


def _text(version: Version | None) -> str:
    return "" if version is None else str(version)


def _version(text: str) -> Version | None:
    return Version.parse(text) if text else None
