"""Judges, trainer, engines and the weight plane: their methods, and clients for those that have one."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import aclosing
from functools import partial
from typing import Self

from meshrl.contract import codec
from meshrl.contract.errors import CorruptError, UnavailableError
from meshrl.contract.ports import Training
from meshrl.contract.types import EngineStats, Sample, Score, TrainerStatus
from meshrl.rpc.clients.base import (
    INTERACTIVE_RETRY_S,
    MARGIN_S,
    SERVICE_RETRY_S,
    GrpcClient,
    RetryBudget,
    connect,
    row,
)
from meshrl.rpc.credentials import Credential, MeshRole
from meshrl.rpc.methods import MethodTable, bare_row, service
from meshrl.v1 import (
    reward_pb2,
    rollout_pb2,
    trainer_pb2,
    training_pb2,
    weight_patches_pb2,
    weights_pb2,
)

TRAINER, ROLLOUT, READER = MeshRole.TRAINER, MeshRole.ROLLOUT, MeshRole.READER


class RolloutTable(MethodTable, service=service(rollout_pb2.DESCRIPTOR, "Rollout")):
    """meshrl.v1.Rollout."""

    @row("GetStats", TRAINER, READER)
    async def stats(self) -> EngineStats:
        """The engine's present statistics."""
        raise NotImplementedError


class RewardTable(MethodTable, service=service(reward_pb2.DESCRIPTOR, "Reward")):
    """meshrl.v1.Reward."""

    by_hand = (
        bare_row("Score", TRAINER, ROLLOUT, READER),
        bare_row("GetInfo", TRAINER, ROLLOUT, READER),
    )


class TrainerTable(MethodTable, service=service(trainer_pb2.DESCRIPTOR, "Trainer")):
    """meshrl.v1.Trainer."""

    by_hand = (bare_row("Watch", READER, waits=True),)

    @row("GetStatus", READER)
    async def status(self) -> TrainerStatus:
        """How training does now."""
        raise NotImplementedError


class WeightsTable(MethodTable, service=service(weights_pb2.DESCRIPTOR, "Weights")):
    """meshrl.v1.Weights."""

    by_hand = (
        bare_row("Join", ROLLOUT, waits=True),
        bare_row("Fleet", READER),
        bare_row("Drain"),
    )


class WeightPatchesTable(
    MethodTable, service=service(weight_patches_pb2.DESCRIPTOR, "WeightPatches")
):
    """meshrl.v1.WeightPatches."""

    by_hand = (bare_row("Fetch", ROLLOUT, waits=True),)


class TrainingTable(MethodTable, Training, service=service(training_pb2.DESCRIPTOR, "Training")):
    """meshrl.v1.Training."""

    submit = row("Submit", MeshRole.TUNER)(Training.submit)
    result = row("Result", MeshRole.TUNER, waits=True)(Training.result)


class TrainingPortClient(GrpcClient, TrainingTable):
    """A remote server that trains models for callers."""

    def __init__(
        self,
        address: str,
        *,
        retry_s: float = SERVICE_RETRY_S,
        credential: Credential | None = None,
    ) -> None:
        opened = partial(connect, credential=credential)
        super().__init__("training", address, retry_s, connect=opened)


class RolloutClient(GrpcClient, RolloutTable):
    """Client of a rollout process: the state of its engine."""

    def __init__(self, address: str, *, retry_s: float = SERVICE_RETRY_S) -> None:
        super().__init__("rollout", address, retry_s)


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
        request = reward_pb2.GetRewardInfoRequest()
        self._hash = await self._connection.call(
            self.methods["GetInfo"], request, lambda answer: answer.reward_hash
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
                self.methods["Score"],
                request,
                lambda answer: [codec.SCORE.decode(score) for score in answer.scores],
                wait_s=self._deadline_s,
            )
            scores += answer
        if [score.uid for score in scores] != [sample.uid for sample in samples]:
            raise CorruptError(f"{self._connection.name} scored other samples than it was asked to")
        self._hash = next((s.reward_hash for s in reversed(scores) if s.reward_hash), self._hash)
        return scores


def _requests(samples: Sequence[Sample], reward_hash: str) -> Iterator[reward_pb2.ScoreRequest]:
    for headers in codec.pages(reward_pb2.Sample.ByteSize, map(codec.SAMPLE.encode, samples)):
        if headers:
            yield reward_pb2.ScoreRequest(samples=headers, reward_hash=reward_hash)


class TrainerClient(GrpcClient, TrainerTable):
    """A remote trainer, for the terminal view and `meshrl status`."""

    def __init__(self, address: str, *, retry_s: float = INTERACTIVE_RETRY_S) -> None:
        super().__init__("trainer", address, retry_s)

    async def watch(self, *, every_s: float = 10.0) -> AsyncIterator[TrainerStatus]:
        """A status at once, after every change and at least every `every_s` seconds; the last has `phase.ended`.

        If the trainer restarts within `retry_s`, the iterator continues.

        Raises UnavailableError if the trainer stays away or sends nothing.
        """
        connection = self._connection
        budget = RetryBudget(connection.retry_s)
        request = trainer_pb2.WatchTrainerRequest(every_s=every_s)
        while True:
            try:
                messages = connection.stream(self.methods["Watch"], request, every_s + MARGIN_S)
                async with aclosing(messages):
                    async for message in messages:
                        status = connection.decode(message, codec.TRAINER_STATUS.decode)
                        budget.reset()
                        yield status
                        if status.phase.ended:
                            return
                raise UnavailableError(f"{connection.name} stopped sending its status")
            except UnavailableError as error:
                await budget.pause(error)
