"""Client for backup and verification of a queue, for operators."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence

import grpc

from meshrl.contract.errors import CorruptError, UnavailableError, UserError
from meshrl.rpc.clients.base import INTERACTIVE_RETRY_S, GrpcClient
from meshrl.rpc.errors import from_rpc
from meshrl.rpc.tables.operators import QueueAdminTable
from meshrl.transferqueue.store import FORMAT, Operation, Table
from meshrl.v1 import queue_admin_pb2 as pb


class QueueAdminClient(GrpcClient, QueueAdminTable):
    """The QueueAdmin operations over gRPC."""

    def __init__(self, address: str, *, retry_s: float = INTERACTIVE_RETRY_S) -> None:
        super().__init__("queue", address, retry_s)

    async def export(self) -> AsyncGenerator[Sequence[Operation], None]:
        """Everything stored, as of one commit.

        Raises:
            UserError: the queue stores another format.
            UnavailableError: the queue went away, or sent nothing for the connection's `answer_s`.
            CorruptError: the backup ends in the middle of a value.
        """
        call = self.remote("Backup")(pb.BackupRequest(), metadata=self._connection.metadata)
        cut: list[bytes] = []
        stream = aiter(call)
        try:
            while True:
                async with asyncio.timeout(self._connection.answer_s):
                    message = await anext(stream, None)
                if message is None:
                    break
                yield list(_operations(message, cut))
        except grpc.aio.AioRpcError as error:
            raise from_rpc(error, self._connection.name) from error
        except TimeoutError as error:
            raise UnavailableError(
                f"{self._connection.name} has sent nothing for {self._connection.answer_s:.0f} s"
            ) from error
        finally:
            call.cancel()
        if cut:
            raise CorruptError(f"{self._connection.name}: the backup ends in the middle of a value")


def _operations(message: pb.BackupPiece, cut: list[bytes]) -> Iterator[Operation]:
    if message.format != FORMAT:
        raise UserError(
            f"the queue stores format {message.format}, this meshrl reads format {FORMAT}: make the"
            " backup with the version that runs there"
        )
    for record in message.records:
        cut.append(record.value)
        if not record.continues:
            table = Table.PAYLOAD if record.payload else Table.META
            yield Operation(table, record.key, b"".join(cut))
            cut.clear()
