"""The reward registry over gRPC, for the command line."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

from typing_extensions import override

from meshrl.contract.types import Sample, Score
from meshrl.rewardd.registry.types import Submission
from meshrl.rpc.clients.base import INTERACTIVE_RETRY_S, GrpcClient
from meshrl.rpc.tables.operators import SUBMISSION, SUBMIT_S, RewardRegistryTable
from meshrl.v1 import reward_registry_pb2 as pb

Answer = TypeVar("Answer")
SAMPLES_PER_CALL = 512


class RewardRegistryClient(GrpcClient, RewardRegistryTable):
    """Each method as in meshrl/v1/reward_registry.proto."""

    def __init__(self, address: str, *, retry_s: float = INTERACTIVE_RETRY_S) -> None:
        super().__init__("reward", address, retry_s)

    async def submit(self, submission: Submission) -> pb.SubmitRewardResponse:
        """Raises UserError with what is wrong, ConflictError, CapacityError."""
        return await self._connection.call(
            self.remote("SubmitReward"), SUBMISSION.encode(submission), _same, wait_s=SUBMIT_S
        )

    @override
    async def score(self, name: str, version: str, samples: Sequence[Sample]) -> list[Score]:
        """One Score per sample, in order. Raises NotFoundError."""
        scores: list[Score] = []
        for part in _parts(samples):
            scores += await super().score(name, version, part)
        return scores


def _parts(samples: Sequence[Sample]) -> Iterator[Sequence[Sample]]:
    for start in range(0, len(samples), SAMPLES_PER_CALL):
        yield samples[start : start + SAMPLES_PER_CALL]


def _same(answer: Answer) -> Answer:
    return answer
