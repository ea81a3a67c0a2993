"""A rollout service's engine over gRPC."""

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc

from meshrl.contract import codec
from meshrl.contract.types import EngineStats, GenerateDelta, GenerateRequest
from meshrl.rpc.clients.peer import STAGE_PATIENCE_S, Wire
from meshrl.rpc.errors import from_rpc
from meshrl.v1 import rollout_pb2 as pb
from meshrl.v1 import rollout_pb2_grpc as rpc


class RolloutClient(Wire):
    """Generation elsewhere; the weights of the engine are none of the caller's business."""

    def __init__(
        self, address: str, *, patience_s: float = STAGE_PATIENCE_S, deadline_s: float = 600.0
    ) -> None:
        super().__init__("rollout", address, patience_s)
        self._stub = rpc.RolloutStub(self._peer.channel)
        self._deadline_s = deadline_s

    async def generate(self, request: GenerateRequest) -> AsyncIterator[GenerateDelta]:
        """Sample one response, within `deadline_s`; closing the iterator aborts it.

        Never asked again by itself: the deltas that came count, and the caller knows them.
        """
        question = codec.encode_generate_request(request)
        self._peer.check_size(question)
        call = self._stub.Generate(question, timeout=self._deadline_s)
        try:
            async for delta in call:
                yield self._peer.understand(delta, codec.decode_generate_delta)
        except grpc.aio.AioRpcError as failure:
            raise from_rpc(failure, self._peer.name) from failure
        finally:
            call.cancel()

    async def stats(self) -> EngineStats:
        """How the engine does now."""
        return await self._peer.ask(
            self._stub.GetStats, pb.GetStatsRequest(), codec.decode_engine_stats
        )
