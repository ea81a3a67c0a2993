"""A trainer, seen over gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc

from meshrl.contract import codec
from meshrl.contract.errors import UnavailableError
from meshrl.contract.types import TrainerStatus
from meshrl.rpc.clients.base import INTERACTIVE_RETRY_S, MARGIN_S, GrpcClient, RetryBudget
from meshrl.rpc.errors import from_rpc
from meshrl.rpc.tables.services import TrainerTable
from meshrl.v1 import trainer_pb2 as pb


class TrainerClient(GrpcClient, TrainerTable):
    """A remote trainer, for the terminal view and `meshrl status`."""

    def __init__(self, address: str, *, retry_s: float = INTERACTIVE_RETRY_S) -> None:
        super().__init__("trainer", address, retry_s)

    async def watch(self, *, every_s: float = 10.0) -> AsyncIterator[TrainerStatus]:
        """A status at once, after every change and at least every `every_s` seconds; the last has `phase.ended`.

        If the trainer restarts within `retry_s`, the iterator goes on.

        Raises UnavailableError if the trainer stays away or sends nothing.
        """
        budget = RetryBudget(self._connection.retry_s)
        while True:
            try:
                async for status in self._watch_once(every_s):
                    budget.reset()
                    yield status
                    if status.phase.ended:
                        return
            except UnavailableError as error:
                await budget.pause(error)

    async def _watch_once(self, every_s: float) -> AsyncIterator[TrainerStatus]:
        """Statuses until the stream breaks. Then raises UnavailableError."""
        call = self.remote("Watch")(
            pb.WatchTrainerRequest(every_s=every_s), metadata=self._connection.metadata
        )
        statuses = aiter(call)
        try:
            while True:
                async with asyncio.timeout(every_s + MARGIN_S):
                    message = await anext(statuses)
                yield self._connection.decode(message, codec.TRAINER_STATUS.decode)
        except grpc.aio.AioRpcError as failure:
            raise from_rpc(failure, self._connection.name) from failure
        except (TimeoutError, StopAsyncIteration) as error:
            raise UnavailableError(f"{self._connection.name} stopped sending its status") from error
        finally:
            call.cancel()
