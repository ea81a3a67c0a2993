"""The gRPC servicer of the weight plane: translates and delegates."""

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc

from meshrl.contract.errors import UnavailableError
from meshrl.services.weights.plane import WeightPlane
from meshrl.services.weights.replica import ReplicaState
from meshrl.services.weights.wire import Line
from meshrl.v1 import weights_pb2 as pb
from meshrl.v1 import weights_pb2_grpc

_STATES = {
    ReplicaState.JOINING: pb.REPLICA_STATE_JOINING,
    ReplicaState.SYNCED: pb.REPLICA_STATE_SYNCED,
    ReplicaState.SERVING: pb.REPLICA_STATE_SERVING,
    ReplicaState.SUSPECT: pb.REPLICA_STATE_SUSPECT,
    ReplicaState.OUT: pb.REPLICA_STATE_OUT,
}
_Context = grpc.aio.ServicerContext[pb.ReplicaMessage, pb.PlaneMessage]


class WeightsDoor(weights_pb2_grpc.WeightsServicer):
    """Attach with `weights_pb2_grpc.add_WeightsServicer_to_server(WeightsDoor(plane), server)`."""

    def __init__(self, plane: WeightPlane, silence_s: float) -> None:
        self._plane = plane
        self._silence_s = silence_s

    # Reads and writes interleave freely here, which a generator of answers could not do.
    async def Join(  # type: ignore[override]
        self, request_iterator: AsyncIterator[pb.ReplicaMessage], context: _Context
    ) -> None:
        """One replica, for as long as it stays."""

        async def write(message: pb.PlaneMessage) -> None:
            try:
                await context.write(message)
            except grpc.aio.BaseError as error:
                raise UnavailableError(f"the replica's stream is closed: {error}") from error

        async def read() -> pb.ReplicaMessage | None:
            return await anext(request_iterator, None)

        await self._plane.serve(Line(read, write, self._silence_s))

    async def Fleet(self, request: pb.FleetRequest, context: object) -> pb.FleetResponse:
        """The fleet at this instant."""
        fleet = self._plane.fleet()
        return pb.FleetResponse(
            run=fleet.run,
            epoch=fleet.epoch,
            committed=str(fleet.committed or ""),
            proposed=str(fleet.proposed or ""),
            replicas=[
                pb.ReplicaInfo(
                    replica=view.name,
                    state=_STATES[view.state],
                    generation=view.generation,
                    version=str(view.version or ""),
                    last_sync_s=view.last_sync_s,
                    pause_s=view.pause_s,
                    reason=view.reason,
                )
                for view in fleet.replicas
            ],
        )
