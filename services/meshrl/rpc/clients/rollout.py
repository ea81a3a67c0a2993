"""The engine of a rollout service over gRPC."""

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc

from meshrl.contract import codec
from meshrl.contract.types import EngineStats, GenerateDelta, GenerateRequest
from meshrl.rpc.clients.base import SERVICE_RETRY_S, GrpcClient
from meshrl.rpc.errors import from_rpc
from meshrl.v1 import rollout_pb2 as pb
from meshrl.v1 import rollout_pb2_grpc as rpc


class RolloutClient(GrpcClient):
    """Generation on a remote engine. Its weights cannot be changed from here."""

    def __init__(
        self, address: str, *, retry_s: float = SERVICE_RETRY_S, deadline_s: float = 600.0
    ) -> None:
        super().__init__("rollout", address, retry_s)
        self._stub = rpc.RolloutStub(self._connection.channel)
        self._deadline_s = deadline_s

    async def generate(self, request: GenerateRequest) -> AsyncIterator[GenerateDelta]:
        """Sample one response within `deadline_s`. Closing the iterator aborts it.

        Never repeated automatically, because the caller already has some deltas.
        """
        message = codec.encode_generate_request(request)
        self._connection.check_size(message)
        call = self._stub.Generate(
            message, timeout=self._deadline_s, metadata=self._connection.metadata
        )
        try:
            async for delta in call:
                yield self._connection.decode(delta, codec.decode_generate_delta)
        except grpc.aio.AioRpcError as failure:
            raise from_rpc(failure, self._connection.name) from failure
        finally:
            call.cancel()

    async def stats(self) -> EngineStats:
        """The engine's present statistics."""
        return await self._connection.call(
            self._stub.GetStats, pb.GetStatsRequest(), codec.decode_engine_stats
        )
