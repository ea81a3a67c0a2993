"""The TrainerControl port over gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc

from meshrl.contract import codec
from meshrl.contract.errors import UnavailableError
from meshrl.contract.types import TrainerStatus
from meshrl.rpc.clients.peer import MARGIN_S, PERSON_PATIENCE_S, Patience, Wire, nothing
from meshrl.rpc.errors import from_rpc
from meshrl.v1 import trainer_pb2 as pb
from meshrl.v1 import trainer_pb2_grpc as rpc


class TrainerClient(Wire):
    """A trainer elsewhere, as the terminal view and `meshrl status` see it."""

    def __init__(self, address: str, *, patience_s: float = PERSON_PATIENCE_S) -> None:
        super().__init__("trainer", address, patience_s)
        self._stub = rpc.TrainerStub(self._peer.channel)

    async def status(self) -> TrainerStatus:
        """See TrainerControl."""
        request = pb.GetTrainerStatusRequest()
        return await self._peer.ask(self._stub.GetStatus, request, codec.decode_trainer_status)

    async def watch(self, *, every_s: float = 10.0) -> AsyncIterator[TrainerStatus]:
        """See TrainerControl. A trainer that restarts within `patience_s` is watched on.

        Raises UnavailableError when it stays away, or stays silent.
        """
        patience = Patience(self._peer.patience_s)
        while True:
            try:
                async for status in self._watch_once(every_s):
                    patience.relax()
                    yield status
                    if status.phase.ended:
                        return
            except UnavailableError as error:
                await patience.pause(error)

    async def _watch_once(self, every_s: float) -> AsyncIterator[TrainerStatus]:
        """Statuses until the stream breaks; then UnavailableError."""
        call = self._stub.Watch(pb.WatchTrainerRequest(every_s=every_s))
        statuses = aiter(call)
        try:
            while True:
                async with asyncio.timeout(every_s + MARGIN_S):
                    message = await anext(statuses)
                yield self._peer.understand(message, codec.decode_trainer_status)
        except grpc.aio.AioRpcError as failure:
            raise from_rpc(failure, self._peer.name) from failure
        except (TimeoutError, StopAsyncIteration) as error:
            raise UnavailableError(f"{self._peer.name} stopped telling how it does") from error
        finally:
            call.cancel()

    async def stop(self, reason: str) -> None:
        """See TrainerControl."""
        request = pb.StopTrainerRequest(reason=codec.printable(reason))
        await self._peer.ask(self._stub.Stop, request, nothing)

    async def save_checkpoint(self, *, wait_s: float) -> int:
        """See TrainerControl. Waits in polls; a checkpoint that was asked for twice is saved once more."""

        async def ask(seconds: float) -> int:
            return await self._peer.ask(
                self._stub.SaveCheckpoint,
                pb.SaveCheckpointRequest(wait_s=seconds),
                lambda answer: answer.step,
                wait_s=seconds,
            )

        return await self._peer.poll(wait_s, ask)
