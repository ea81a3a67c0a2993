"""Backup and verification of the queue for operators. meshrl/v1/queue_admin.proto describes each method."""
# ruff: noqa: D102

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import aclosing
from typing import Final

import grpc

from meshrl.contract import codec
from meshrl.rpc.interceptors import Context, full_name
from meshrl.transferqueue.admin import QueueAdmin
from meshrl.transferqueue.operations.removal import StoredRun
from meshrl.transferqueue.store import FORMAT, Operation, Table
from meshrl.v1 import queue_admin_pb2 as pb
from meshrl.v1 import queue_admin_pb2_grpc as rpc

PIECE_BYTES: Final = 1 << 20
"""Bytes of one message. In larger messages protobuf's copies cost more than they save."""


class QueueAdminServicer(rpc.QueueAdminServicer):
    """Translates and delegates."""

    service: Final = full_name(pb.DESCRIPTOR, "QueueAdmin")
    waits: Final = frozenset({"Backup", "Verify"})

    def __init__(self, admin: QueueAdmin) -> None:
        self._admin = admin

    def attach(self, server: grpc.aio.Server) -> None:
        rpc.add_QueueAdminServicer_to_server(self, server)

    async def Backup(
        self, request: pb.BackupRequest, context: Context
    ) -> AsyncIterator[pb.BackupPiece]:
        async with aclosing(self._admin.export()) as pieces:
            async for piece in pieces:
                for message in encode_piece(piece):
                    yield message

    async def Verify(self, request: pb.VerifyRequest, context: Context) -> pb.VerifyResponse:
        audit = await self._admin.verify()
        return pb.VerifyResponse(
            ledgers=map(codec.LEDGER.encode, audit.ledgers.values()),
            records=audit.records,
            values=audit.values,
            nbytes=audit.nbytes,
            problems=map(codec.printable, audit.problems),
        )

    async def ListRuns(self, request: pb.ListRunsRequest, context: Context) -> pb.StoredRuns:
        return pb.StoredRuns(runs=map(_encode_run, await self._admin.runs()))

    async def RemoveRun(self, request: pb.RemoveRunRequest, context: Context) -> pb.StoredRun:
        return _encode_run(await self._admin.remove_run(request.run, force=request.force))


def _encode_run(run: StoredRun) -> pb.StoredRun:
    return pb.StoredRun(
        ledger=codec.LEDGER.encode(run.ledger),
        opened_by=run.opened_by,
        epoch=run.epoch,
        committed_step=run.committed_step,
        feed_closed=run.feed_closed,
        dead_letters=run.dead_letters,
        attached=map(codec.printable, run.attached),
    )


def encode_piece(piece: Sequence[Operation]) -> Iterator[pb.BackupPiece]:
    """Messages of about PIECE_BYTES. A larger value is cut into several."""
    message = pb.BackupPiece(format=FORMAT)
    size = 0
    for table, key, value in piece:
        assert value is not None
        for at in range(0, max(1, len(value)), PIECE_BYTES):
            part = value[at : at + PIECE_BYTES]
            message.records.add(
                payload=table is Table.PAYLOAD,
                key=key,
                value=part,
                continues=at + PIECE_BYTES < len(value),
            )
            size += len(key) + len(part)
            if size >= PIECE_BYTES:
                yield message
                message, size = pb.BackupPiece(format=FORMAT), 0
    if message.records:
        yield message
