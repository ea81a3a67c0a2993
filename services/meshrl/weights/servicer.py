"""The gRPC servicer of the weight plane: translates and delegates."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Final

import grpc

from meshrl.rpc.interceptors import Context, full_name
from meshrl.v1 import weights_pb2 as pb
from meshrl.v1 import weights_pb2_grpc as rpc
from meshrl.weights.coordinator import WeightCoordinator
from meshrl.weights.fleet import FLEET
from meshrl.weights.messages import stream_to_replica


class WeightsServicer(rpc.WeightsServicer):
    """The RPCs of the weight coordinator: `Join` for replicas, `Fleet` and `Drain` for who looks after them."""

    service: Final = full_name(pb.DESCRIPTOR, "Weights")
    waits: Final = frozenset({"Join"})

    def __init__(self, coordinator: WeightCoordinator) -> None:
        self._coordinator = coordinator

    def attach(self, server: grpc.aio.Server) -> None:
        """Register the servicer."""
        rpc.add_WeightsServicer_to_server(self, server)

    # A coroutine that writes, not a generator of answers: heartbeats must not wait for the next answer.
    async def Join(  # type: ignore[override]
        self, request_iterator: AsyncIterator[pb.ReplicaMessage], context: Context
    ) -> None:
        """The stream of one replica, until it leaves."""
        silence_s = self._coordinator.silence_s
        await self._coordinator.serve(stream_to_replica(request_iterator, context, silence_s))

    async def Fleet(self, request: pb.FleetRequest, context: Context) -> pb.FleetResponse:
        """The fleet at this instant."""
        return FLEET.encode(self._coordinator.fleet())

    async def Drain(self, request: pb.DrainRequest, context: Context) -> pb.DrainResponse:
        """Ask one replica to leave."""
        await self._coordinator.drain(request.replica)
        return pb.DrainResponse()
