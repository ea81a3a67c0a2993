"""Serves how a trainer does over gRPC. meshrl/v1/trainer.proto describes each method."""
# ruff: noqa: D102

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

from meshrl.contract import codec
from meshrl.contract.types import TrainerStatus
from meshrl.rpc.interceptors import Context, bounded, closing
from meshrl.rpc.servicers.base import TableServicer
from meshrl.rpc.tables.services import TrainerTable
from meshrl.v1 import trainer_pb2 as pb


class Training(Protocol):
    """The state of a trainer, for whoever watches it."""

    def status(self) -> TrainerStatus: ...

    def watch(self, every_s: float) -> AsyncIterator[TrainerStatus]: ...


class TrainerServicer(TableServicer, table=TrainerTable):
    """The stream of statuses."""

    def __init__(self, trainer: Training) -> None:
        super().__init__(trainer)
        self._trainer = trainer

    async def Watch(
        self, request: pb.WatchTrainerRequest, context: Context
    ) -> AsyncIterator[pb.TrainerStatus]:
        every_s = max(1.0, bounded(request.every_s))
        async with closing(self._trainer.watch(every_s)) as statuses:
            async for status in statuses:
                yield codec.TRAINER_STATUS.encode(status)
