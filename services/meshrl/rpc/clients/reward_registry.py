"""The reward registry over gRPC, for the command line."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

from meshrl.contract import codec
from meshrl.contract.types import Sample, Score
from meshrl.rewardd.registry.types import Name, Submission
from meshrl.rpc.clients.base import INTERACTIVE_RETRY_S, GrpcClient
from meshrl.rpc.reward_registry_codec import NAME, SUBMISSION
from meshrl.v1 import reward_registry_pb2 as pb
from meshrl.v1 import reward_registry_pb2_grpc as rpc

Answer = TypeVar("Answer")
SUBMIT_S = 600.0
"""Loading and testing a submission have deadlines of their own in the service."""
SAMPLES_PER_CALL = 512


class RewardRegistryClient(GrpcClient):
    """Each method as in meshrl/v1/reward_registry.proto."""

    def __init__(self, address: str, *, retry_s: float = INTERACTIVE_RETRY_S) -> None:
        super().__init__("reward", address, retry_s)
        self._stub = rpc.RewardRegistryStub(self._connection.channel)

    async def submit(self, submission: Submission) -> pb.SubmitRewardResponse:
        """Raises UserError with what is wrong, ConflictError, CapacityError."""
        request = SUBMISSION.encode(submission)
        return await self._connection.call(self._stub.SubmitReward, request, _same, wait_s=SUBMIT_S)

    async def names(self) -> pb.RewardNames:
        """Every name, and what scores the run."""
        return await self._connection.call(self._stub.ListRewards, pb.ListRewardsRequest(), _same)

    async def get(self, name: str, version: str = "") -> pb.RewardVersion:
        """One version with its content. Raises NotFoundError."""
        request = pb.RewardRef(name=name, version=version)
        return await self._connection.call(self._stub.GetReward, request, _same)

    async def diff(self, name: str, old: str, new: str = "") -> str:
        """A unified diff. Raises NotFoundError."""
        request = pb.RewardPair(name=name, old=old, new=new)
        return await self._connection.call(
            self._stub.DiffRewards, request, lambda answer: answer.text
        )

    async def roll_back(self, name: str, version: str = "") -> Name:
        """Raises NotFoundError, ConflictError."""
        request = pb.RewardRef(name=name, version=version)
        # Not repeatable: without a version, twice goes back two.
        return await self._connection.call(
            self._stub.RollBackReward, request, NAME.decode, wait_s=SUBMIT_S, repeatable=False
        )

    async def retire(self, name: str, version: str) -> Name:
        """Raises NotFoundError, ConflictError."""
        request = pb.RewardRef(name=name, version=version)
        return await self._connection.call(self._stub.RetireReward, request, NAME.decode)

    async def score(self, name: str, version: str, samples: Sequence[Sample]) -> list[Score]:
        """One Score per sample, in order. Raises NotFoundError."""
        scores: list[Score] = []
        for part in _parts(samples):
            messages = [codec.SAMPLE.encode(sample) for sample in part]
            request = pb.TryRewardRequest(name=name, version=version, samples=messages)
            answer = await self._connection.call(
                self._stub.TryReward, request, _same, wait_s=SUBMIT_S
            )
            scores += [codec.SCORE.decode(score) for score in answer.scores]
        return scores

    async def compare(
        self, name: str, a: str, b: str, samples: Sequence[Sample] = ()
    ) -> pb.RewardDifferences:
        """Raises NotFoundError."""
        messages = [codec.SAMPLE.encode(sample) for sample in samples]
        request = pb.CompareRewardsRequest(name=name, a=a, b=b, samples=messages)
        return await self._connection.call(
            self._stub.CompareRewards, request, _same, wait_s=SUBMIT_S
        )


def _parts(samples: Sequence[Sample]) -> Iterator[Sequence[Sample]]:
    for start in range(0, len(samples), SAMPLES_PER_CALL):
        yield samples[start : start + SAMPLES_PER_CALL]


def _same(answer: Answer) -> Answer:
    return answer
