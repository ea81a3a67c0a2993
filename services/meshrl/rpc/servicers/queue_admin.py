"""Backup and verification of the queue for operators. meshrl/v1/queue_admin.proto describes each method."""
# ruff: noqa: D102

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import aclosing
from typing import Final

from meshrl.rpc.interceptors import Context
from meshrl.rpc.servicers.base import TableServicer
from meshrl.rpc.tables.operators import QueueAdminTable
from meshrl.transferqueue.admin import QueueAdmin
from meshrl.transferqueue.store import FORMAT, Operation, Table
from meshrl.v1 import queue_admin_pb2 as pb

PIECE_BYTES: Final = 1 << 20
"""Bytes of one message. In larger messages protobuf's copies cost more than they save."""


class QueueAdminServicer(TableServicer, table=QueueAdminTable):
    """The stream of a backup."""

    def __init__(self, admin: QueueAdmin) -> None:
        super().__init__(admin)
        self._admin = admin

    async def Backup(
        self, request: pb.BackupRequest, context: Context
    ) -> AsyncIterator[pb.BackupPiece]:
        async with aclosing(self._admin.export()) as pieces:
            async for piece in pieces:
                for message in encode_piece(piece):
                    yield message


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
