"""Serves a LogProbs port over gRPC. meshrl/v1/reference.proto describes its method."""
# ruff: noqa: D102

from __future__ import annotations

from typing import Final

import grpc

from meshrl.contract import codec
from meshrl.contract.ports import LogProbs
from meshrl.rpc.interceptors import Context, full_name
from meshrl.v1 import reference_pb2 as pb
from meshrl.v1 import reference_pb2_grpc as rpc


class ReferenceServicer(rpc.ReferenceServicer):
    """Translates and delegates."""

    service: Final = full_name(pb.DESCRIPTOR, "Reference")
    waits: Final[frozenset[str]] = frozenset()

    def __init__(self, model: LogProbs) -> None:
        self._model = model

    def attach(self, server: grpc.aio.Server) -> None:
        rpc.add_ReferenceServicer_to_server(self, server)

    async def LogProbs(self, request: pb.LogProbsRequest, context: Context) -> pb.LogProbsResponse:
        rows = [codec.decode_array(row, "int32", axes=1) for row in request.rows]
        logprobs = await self._model.logprobs(rows, temperature=request.temperature)
        return pb.LogProbsResponse(rows=map(codec.encode_array, logprobs))
