"""The LogProbs port over gRPC."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from meshrl.contract import codec
from meshrl.contract.errors import CorruptError
from meshrl.contract.types import Float32, Int32
from meshrl.rpc.clients.base import SERVICE_RETRY_S, GrpcClient
from meshrl.v1 import reference_pb2 as pb
from meshrl.v1 import reference_pb2_grpc as rpc
from meshrl.v1.trajectory_pb2 import Array


class LogProbsClient(GrpcClient):
    """A remote frozen model."""

    def __init__(
        self, address: str, *, retry_s: float = SERVICE_RETRY_S, deadline_s: float = 600.0
    ) -> None:
        super().__init__("reference", address, retry_s)
        self._stub = rpc.ReferenceStub(self._connection.channel)
        self._deadline_s = deadline_s

    async def logprobs(
        self, rows: Sequence[Int32], *, temperature: float = 1.0
    ) -> Sequence[Float32]:
        """See LogProbs. `deadline_s` applies to each message of at most a mebibyte of tokens."""
        logprobs: list[Float32] = []
        for request in _requests(rows, temperature):
            logprobs += await self._connection.call(
                self._stub.LogProbs,
                request,
                lambda answer: [codec.decode_array(row, "float32", 1) for row in answer.rows],
                wait_s=self._deadline_s,
            )
        if [len(row) for row in logprobs] != [len(row) for row in rows]:
            raise CorruptError(f"{self._connection.name} answered for other tokens than were sent")
        return logprobs


def _requests(rows: Sequence[Int32], temperature: float) -> Iterator[pb.LogProbsRequest]:
    for headers in codec.pages(Array.ByteSize, map(codec.encode_array, rows)):
        if headers:
            yield pb.LogProbsRequest(rows=headers, temperature=temperature)
