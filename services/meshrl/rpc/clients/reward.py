"""The Judge port over gRPC."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Self

from meshrl.contract import codec
from meshrl.contract.errors import CorruptError
from meshrl.contract.types import Sample, Score
from meshrl.rpc.clients.peer import STAGE_PATIENCE_S, Wire
from meshrl.v1 import reward_pb2 as pb
from meshrl.v1 import reward_pb2_grpc as rpc


class JudgeClient(Wire):
    """A Judge elsewhere. Entering the context (or `open`) asks it for its hash."""

    def __init__(
        self, address: str, *, patience_s: float = STAGE_PATIENCE_S, deadline_s: float = 600.0
    ) -> None:
        super().__init__("reward", address, patience_s)
        self._stub = rpc.RewardStub(self._peer.channel)
        self._deadline_s = deadline_s
        self._hash = ""

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def open(self) -> None:
        """Ask what scores. Raises UnavailableError."""
        request = pb.GetRewardInfoRequest()
        self._hash = await self._peer.ask(
            self._stub.GetInfo, request, lambda answer: answer.reward_hash
        )

    @property
    def reward_hash(self) -> str:
        """Content hash of what scored last, or of what would when the wire was opened."""
        return self._hash

    async def current(self) -> str:
        """The version that scores now. Raises UnavailableError."""
        await self.open()
        return self._hash

    async def score(self, samples: Sequence[Sample], *, reward_hash: str = "") -> Sequence[Score]:
        """One Score per sample, in order, by the version of the moment or by `reward_hash`.

        Each message of at most a mebibyte of samples has `deadline_s`. Raises NotFoundError.
        """
        scores: list[Score] = []
        for request in _requests(samples, reward_hash):
            answer = await self._peer.ask(
                self._stub.Score,
                request,
                lambda answer: [codec.decode_score(score) for score in answer.scores],
                wait_s=self._deadline_s,
            )
            scores += answer
        if [score.uid for score in scores] != [sample.uid for sample in samples]:
            raise CorruptError(f"{self._peer.name} scored other samples than it was asked to")
        self._hash = next((s.reward_hash for s in reversed(scores) if s.reward_hash), self._hash)
        return scores


def _requests(samples: Sequence[Sample], reward_hash: str) -> Iterator[pb.ScoreRequest]:
    for headers in codec.pages(codec.encode_sample(sample) for sample in samples):
        if headers:
            yield pb.ScoreRequest(samples=headers, reward_hash=reward_hash)
