"""Serves how a trainer does over gRPC. meshrl/v1/trainer.proto describes each method."""
# ruff: noqa: D102

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Final, Protocol

import grpc

from meshrl.contract import codec
from meshrl.contract.types import TrainerStatus
from meshrl.rpc.interceptors import Context, bounded, closing, full_name
from meshrl.v1 import trainer_pb2 as pb
from meshrl.v1 import trainer_pb2_grpc as rpc


class Training(Protocol):
    """The state of a trainer, for whoever watches it."""

    def status(self) -> TrainerStatus: ...

    def watch(self, every_s: float) -> AsyncIterator[TrainerStatus]: ...


class TrainerServicer(rpc.TrainerServicer):
    """Translates and delegates."""

    service: Final = full_name(pb.DESCRIPTOR, "Trainer")
    waits: Final = frozenset({"Watch"})

    def __init__(self, trainer: Training) -> None:
        self._trainer = trainer

    def attach(self, server: grpc.aio.Server) -> None:
        rpc.add_TrainerServicer_to_server(self, server)

    async def GetStatus(
        self, request: pb.GetTrainerStatusRequest, context: Context
    ) -> pb.TrainerStatus:
        return codec.TRAINER_STATUS.encode(self._trainer.status())

    async def Watch(
        self, request: pb.WatchTrainerRequest, context: Context
    ) -> AsyncIterator[pb.TrainerStatus]:
        every_s = max(1.0, bounded(request.every_s))
        async with closing(self._trainer.watch(every_s)) as statuses:
            async for status in statuses:
                yield codec.TRAINER_STATUS.encode(status)
