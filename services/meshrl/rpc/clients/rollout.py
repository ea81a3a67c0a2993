"""The engine of a rollout service, seen over gRPC."""

from __future__ import annotations

from meshrl.contract import codec
from meshrl.contract.types import EngineStats
from meshrl.rpc.clients.base import SERVICE_RETRY_S, GrpcClient
from meshrl.v1 import rollout_pb2 as pb
from meshrl.v1 import rollout_pb2_grpc as rpc


class RolloutClient(GrpcClient):
    """Client of a rollout process: the state of its engine."""

    def __init__(self, address: str, *, retry_s: float = SERVICE_RETRY_S) -> None:
        super().__init__("rollout", address, retry_s)
        self._stub = rpc.RolloutStub(self._connection.channel)

    async def stats(self) -> EngineStats:
        """The engine's present statistics."""
        return await self._connection.call(
            self._stub.GetStats, pb.GetStatsRequest(), codec.ENGINE_STATS.decode
        )
