"""The gRPC servicer of the weight plane: translates and delegates."""

from __future__ import annotations

from collections.abc import AsyncIterator

from meshrl.rpc.clients.services import WeightsTable
from meshrl.rpc.interceptors import Context
from meshrl.rpc.servicers import TableServicer
from meshrl.v1 import weights_pb2 as pb
from meshrl.weights.coordinator import WeightCoordinator
from meshrl.weights.fleet import FLEET
from meshrl.weights.messages import stream_to_replica


class WeightsServicer(TableServicer, table=WeightsTable):
    """The RPCs of the weight coordinator: `Join` for replicas, `Fleet` and `Drain` for who looks after them."""

    def __init__(self, coordinator: WeightCoordinator) -> None:
        super().__init__(coordinator)
        self._coordinator = coordinator

    # A coroutine that writes, not a generator of answers: heartbeats must not wait for the next answer.
    async def Join(
        self, request_iterator: AsyncIterator[pb.ReplicaMessage], context: Context
    ) -> None:
        """Serve the stream of one replica, until it leaves."""
        silence_s = self._coordinator.silence_s
        await self._coordinator.serve(stream_to_replica(request_iterator, context, silence_s))

    async def Fleet(self, request: pb.FleetRequest, context: Context) -> pb.FleetResponse:
        """The fleet at this instant."""
        return FLEET.encode(self._coordinator.fleet())

    async def Drain(self, request: pb.DrainRequest, context: Context) -> pb.DrainResponse:
        """Ask one replica to leave."""
        await self._coordinator.drain(request.replica)
        return pb.DrainResponse()
