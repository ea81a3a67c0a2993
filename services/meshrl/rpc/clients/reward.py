"""The Judge port over gRPC."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Self

from meshrl.contract import codec
from meshrl.contract.errors import CorruptError
from meshrl.contract.types import Sample, Score
from meshrl.rpc.clients.base import SERVICE_RETRY_S, GrpcClient
from meshrl.rpc.tables.services import RewardTable
from meshrl.v1 import reward_pb2 as pb


class JudgeClient(GrpcClient, RewardTable):
    """A remote Judge. Entering the context (or `open`) asks for its reward hash."""

    def __init__(
        self, address: str, *, retry_s: float = SERVICE_RETRY_S, deadline_s: float = 600.0
    ) -> None:
        super().__init__("reward", address, retry_s)
        self._deadline_s = deadline_s
        self._hash = ""

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def open(self) -> None:
        """Read the present reward hash. Raises UnavailableError."""
        request = pb.GetRewardInfoRequest()
        self._hash = await self._connection.call(
            self.remote("GetInfo"), request, lambda answer: answer.reward_hash
        )

    @property
    def reward_hash(self) -> str:
        """Content hash of the reward that scored last; before the first score, of the one in use at `open`."""
        return self._hash

    async def current(self) -> str:
        """The hash of the reward in use now. Raises UnavailableError."""
        await self.open()
        return self._hash

    async def score(self, samples: Sequence[Sample], *, reward_hash: str = "") -> Sequence[Score]:
        """One Score per sample, in order, by the reward in use or by the reward `reward_hash`.

        `deadline_s` applies to each message of at most a mebibyte of samples. Raises NotFoundError.
        """
        scores: list[Score] = []
        for request in _requests(samples, reward_hash):
            answer = await self._connection.call(
                self.remote("Score"),
                request,
                lambda answer: [codec.SCORE.decode(score) for score in answer.scores],
                wait_s=self._deadline_s,
            )
            scores += answer
        if [score.uid for score in scores] != [sample.uid for sample in samples]:
            raise CorruptError(f"{self._connection.name} scored other samples than it was asked to")
        self._hash = next((s.reward_hash for s in reversed(scores) if s.reward_hash), self._hash)
        return scores


def _requests(samples: Sequence[Sample], reward_hash: str) -> Iterator[pb.ScoreRequest]:
    for headers in codec.pages(pb.Sample.ByteSize, map(codec.SAMPLE.encode, samples)):
        if headers:
            yield pb.ScoreRequest(samples=headers, reward_hash=reward_hash)
