"""Client for backup and verification of a queue, for operators."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from typing import Final

import grpc

from meshrl.contract import codec
from meshrl.contract.errors import CorruptError, UnavailableError, UserError
from meshrl.rpc.clients.base import INTERACTIVE_RETRY_S, GrpcClient
from meshrl.rpc.errors import from_rpc
from meshrl.transferqueue.operations.audit import Audit
from meshrl.transferqueue.operations.removal import StoredRun
from meshrl.transferqueue.store import FORMAT, Operation, Table
from meshrl.v1 import queue_admin_pb2 as pb
from meshrl.v1 import queue_admin_pb2_grpc as rpc

AUDIT_S: Final = 3600.0
"""Seconds for an audit, which reads everything that is stored."""


class QueueAdminClient(GrpcClient):
    """The QueueAdmin operations over gRPC."""

    def __init__(self, address: str, *, retry_s: float = INTERACTIVE_RETRY_S) -> None:
        super().__init__("queue", address, retry_s)
        self._stub = rpc.QueueAdminStub(self._connection.channel)

    async def export(self) -> AsyncGenerator[Sequence[Operation], None]:
        """Everything stored, as of one commit.

        Raises:
            UserError: the queue stores another format.
            UnavailableError: the queue went away, or sent nothing for the connection's `answer_s`.
            CorruptError: the backup ends in the middle of a value.
        """
        call = self._stub.Backup(pb.BackupRequest(), metadata=self._connection.metadata)
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

    async def verify(self) -> Audit:
        """Audit the store, and compare it with the queue's ledgers."""

        def decode(answer: pb.VerifyResponse) -> Audit:
            ledgers = [codec.LEDGER.decode(ledger) for ledger in answer.ledgers]
            return Audit(
                ledgers={ledger.run: ledger for ledger in ledgers},
                records=answer.records,
                values=answer.values,
                nbytes=answer.nbytes,
                problems=list(answer.problems),
            )

        return await self._connection.call(
            self._stub.Verify, pb.VerifyRequest(), decode, wait_s=AUDIT_S
        )

    async def runs(self) -> Sequence[StoredRun]:
        """All runs of the queue."""

        def decode(answer: pb.StoredRuns) -> Sequence[StoredRun]:
            return [_decode_run(run) for run in answer.runs]

        return await self._connection.call(self._stub.ListRuns, pb.ListRunsRequest(), decode)

    async def remove_run(self, run: str, *, force: bool) -> StoredRun:
        """Remove a run from the store. Where the answer is lost, the next call raises NotFoundError."""
        request = pb.RemoveRunRequest(run=run, force=force)
        return await self._connection.call(
            self._stub.RemoveRun, request, _decode_run, repeatable=False
        )


def _decode_run(message: pb.StoredRun) -> StoredRun:
    return StoredRun(
        ledger=codec.LEDGER.decode(message.ledger),
        opened_by=message.opened_by,
        epoch=message.epoch,
        committed_step=message.committed_step,
        feed_closed=message.feed_closed,
        dead_letters=message.dead_letters,
        attached=tuple(message.attached),
    )


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
