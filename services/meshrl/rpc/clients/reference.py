"""The LogProbs port over gRPC."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from meshrl.contract import codec
from meshrl.contract.errors import CorruptError
from meshrl.contract.types import Float32, Int32
from meshrl.rpc.clients.peer import STAGE_PATIENCE_S, Wire
from meshrl.v1 import reference_pb2 as pb
from meshrl.v1 import reference_pb2_grpc as rpc


class LogProbsClient(Wire):
    """A frozen model elsewhere."""

    def __init__(
        self, address: str, *, patience_s: float = STAGE_PATIENCE_S, deadline_s: float = 600.0
    ) -> None:
        super().__init__("reference", address, patience_s)
        self._stub = rpc.ReferenceStub(self._peer.channel)
        self._deadline_s = deadline_s

    async def logprobs(
        self, rows: Sequence[Int32], *, temperature: float = 1.0
    ) -> Sequence[Float32]:
        """See LogProbs; `deadline_s` for each message of at most a mebibyte of tokens."""
        found: list[Float32] = []
        for request in _requests(rows, temperature):
            found += await self._peer.ask(
                self._stub.LogProbs,
                request,
                lambda answer: [codec.decode_array(row, "float32", 1) for row in answer.rows],
                wait_s=self._deadline_s,
            )
        if [len(row) for row in found] != [len(row) for row in rows]:
            raise CorruptError(f"{self._peer.name} answered for other tokens than were sent")
        return found


def _requests(rows: Sequence[Int32], temperature: float) -> Iterator[pb.LogProbsRequest]:
    for headers in codec.pages(codec.encode_array(row) for row in rows):
        if headers:
            yield pb.LogProbsRequest(rows=headers, temperature=temperature)
