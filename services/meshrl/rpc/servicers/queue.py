"""Serves a Queue port over gRPC: what its table does not say. meshrl/v1/queue.proto describes each method."""
# ruff: noqa: D102

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Final, TypeVar

from google.protobuf.message import Message

from meshrl.contract import codec
from meshrl.contract.codec.compression import TAKES_COMPRESSED
from meshrl.contract.ports import HeartbeatQueue
from meshrl.rpc.identity import caller_of_quota, require_stage, served_stages
from meshrl.rpc.interceptors import ANSWERED, Context, bounded
from meshrl.rpc.servicers.base import TableServicer
from meshrl.rpc.tables.queue import QueueTable
from meshrl.v1 import queue_pb2 as pb
from meshrl.v1.trajectory_pb2 import Ack

M = TypeVar("M", bound=Message)
PIECE_BYTES: Final = 16 << 20
"""Payload of one piece of an answer, by the size of the groups before it."""
FIRST_GROUPS: Final = 4
"""Groups of the first piece, whose size is not known."""


class QueueServicer(TableServicer, table=QueueTable):
    """Streams, and whose quota and stages a call is for."""

    def __init__(self, queue: HeartbeatQueue) -> None:
        super().__init__(queue)
        self._queue = queue

    async def OpenRun(self, request: pb.OpenRunRequest, context: Context) -> pb.RunState:
        spec = codec.RUN_SPEC.decode(request.spec)
        state = await self._queue.open_run(spec, caller=caller_of_quota())
        return codec.RUN_STATE.encode(state)

    async def Admit(
        self, request_iterator: AsyncIterator[pb.AdmitRequest], context: Context
    ) -> pb.AdmitResponse:
        call = codec.decode_admit(await self.collected("Admit", request_iterator))
        admitted = await self._queue.admit(
            call.run, call.tasks, cursor=call.cursor, wait_s=bounded(call.wait_s)
        )
        return pb.AdmitResponse(admitted=admitted)

    async def Lease(
        self, request: pb.LeaseRequest, context: Context
    ) -> AsyncIterator[codec.Bulk[pb.LeaseResponse]]:
        for message in self._bulk(await self.answer("Lease", request), context):
            yield message

    async def Attend(self, request: pb.AttendRequest, context: Context) -> AsyncIterator[Ack]:
        with self._queue.heartbeat(request.worker, serves=served_stages()):
            yield Ack()
            await asyncio.get_running_loop().create_future()

    async def Write(
        self, request_iterator: AsyncIterator[codec.Bulk[pb.WriteRequest]], context: Context
    ) -> Ack:
        call = codec.decode_write(await self.collected("Write", request_iterator))
        require_stage(call.stage)
        await self._queue.write(call.run, call.stage, call.blocks)
        return Ack()

    async def Append(
        self, request_iterator: AsyncIterator[codec.Bulk[pb.WriteRequest]], context: Context
    ) -> Ack:
        call = codec.decode_write(await self.collected("Append", request_iterator))
        require_stage(call.stage)
        await self._queue.append(call.run, call.stage, call.blocks)
        return Ack()

    async def Fetch(
        self, request: pb.FetchRowsRequest, context: Context
    ) -> AsyncIterator[codec.Bulk[pb.FetchRowsResponse]]:
        """Read and send piece by piece: a caller that does not read keeps one piece in memory."""
        asked = codec.decode_rows(request.rows)
        columns = list(request.columns)
        answered = ANSWERED.get()
        done, count = 0, FIRST_GROUPS
        while not done or done < len(asked):
            answered(PIECE_BYTES)
            piece = asked[done : done + count]
            blocks = await self._queue.fetch(request.run, piece, columns)
            nbytes = sum(len(frame.value) for block in blocks for frame in block.frames)
            answered(nbytes - PIECE_BYTES)
            announced = 0 if done else len(asked)
            for message in self._bulk(codec.encode_fetched(blocks, announced), context):
                yield message
            answered(-nbytes)
            done += max(1, len(piece))
            count = min(8 * count, max(1, count * PIECE_BYTES // max(1, nbytes)))

    @staticmethod
    def _bulk(messages: Iterable[codec.Bulk[M]], context: Context) -> Iterator[codec.Bulk[M]]:
        """Compress the frames if the caller accepts that."""
        if TAKES_COMPRESSED in (context.invocation_metadata() or ()):
            return (message.compressed() for message in messages)
        return iter(messages)
