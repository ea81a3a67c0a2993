"""Serves a Queue port over gRPC. meshrl/v1/queue.proto describes each method."""
# ruff: noqa: D102

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Final, TypeVar

import grpc
from google.protobuf.message import Message

from meshrl.contract import codec
from meshrl.contract.codec.compression import TAKES_COMPRESSED
from meshrl.contract.ports import HeartbeatQueue
from meshrl.rpc.identity import caller_of_quota, require_stage, served_stages
from meshrl.rpc.interceptors import Context, bounded, collected, full_name
from meshrl.v1 import queue_pb2 as pb
from meshrl.v1 import queue_pb2_grpc as rpc
from meshrl.v1.trajectory_pb2 import Ack

M = TypeVar("M", bound=Message)


class QueueServicer(rpc.QueueServicer):
    """Translates and delegates."""

    service: Final = full_name(pb.DESCRIPTOR, "Queue")
    waits: Final = frozenset({"Admit", "Attend", "Lease", "Take"})
    parsers: Final = dict.fromkeys(("Write", "Append"), codec.parser(pb.WriteRequest))
    serializers: Final = dict.fromkeys(("Lease", "Fetch"), codec.Bulk.SerializeToString)

    def __init__(self, queue: HeartbeatQueue) -> None:
        self._queue = queue

    def attach(self, server: grpc.aio.Server) -> None:
        rpc.add_QueueServicer_to_server(self, server)

    async def OpenRun(self, request: pb.OpenRunRequest, context: Context) -> pb.RunState:
        spec = codec.RUN_SPEC.decode(request.spec)
        return codec.RUN_STATE.encode(await self._queue.open_run(spec, caller=caller_of_quota()))

    async def GetRunState(self, request: pb.RunRequest, context: Context) -> pb.RunState:
        return codec.RUN_STATE.encode(await self._queue.run_state(request.run))

    async def Acquire(self, request: pb.AcquireRequest, context: Context) -> pb.RunState:
        return codec.RUN_STATE.encode(await self._queue.acquire(request.run, request.owner))

    async def Admit(
        self, request_iterator: AsyncIterator[pb.AdmitRequest], context: Context
    ) -> pb.AdmitResponse:
        call = codec.decode_admit(await collected(request_iterator))
        admitted = await self._queue.admit(
            call.run, call.tasks, cursor=call.cursor, wait_s=bounded(call.wait_s)
        )
        return pb.AdmitResponse(admitted=admitted)

    async def CloseFeed(self, request: pb.RunRequest, context: Context) -> Ack:
        await self._queue.close_feed(request.run)
        return Ack()

    async def Lease(  # type: ignore[override]  # payload beside the message
        self, request: pb.LeaseRequest, context: Context
    ) -> AsyncIterator[codec.Bulk[pb.LeaseResponse]]:
        require_stage(request.stage)
        lease = await self._queue.lease(
            list(request.runs),
            request.stage,
            worker=request.worker,
            limit=request.limit,
            at_least=request.at_least,
            version=codec.VERSION.decode(request.version) if request.HasField("version") else None,
            wait_s=bounded(request.wait_s),
        )
        for message in self._bulk(codec.encode_lease(lease), context):
            yield message

    async def Renew(self, request: pb.RenewRequest, context: Context) -> pb.RenewResponse:
        require_stage(request.stage)
        uids = codec.decode_uids(request.uids)
        lost = await self._queue.renew(request.run, request.stage, request.worker, uids)
        return pb.RenewResponse(lost=codec.encode_uids(lost))

    async def Attend(self, request: pb.AttendRequest, context: Context) -> AsyncIterator[Ack]:
        with self._queue.heartbeat(request.worker, serves=served_stages()):
            yield Ack()
            await asyncio.get_running_loop().create_future()

    async def Write(  # type: ignore[override]  # payload beside the message
        self, request_iterator: AsyncIterator[codec.Bulk[pb.WriteRequest]], context: Context
    ) -> Ack:
        call = codec.decode_write(await collected(request_iterator))
        require_stage(call.stage)
        await self._queue.write(call.run, call.stage, call.blocks)
        return Ack()

    async def Append(  # type: ignore[override]  # payload beside the message
        self, request_iterator: AsyncIterator[codec.Bulk[pb.WriteRequest]], context: Context
    ) -> Ack:
        call = codec.decode_write(await collected(request_iterator))
        require_stage(call.stage)
        await self._queue.append(call.run, call.stage, call.blocks)
        return Ack()

    async def Redo(self, request: pb.RedoRequest, context: Context) -> pb.RedoResponse:
        uids = codec.decode_uids(request.uids)
        return pb.RedoResponse(rows=await self._queue.redo(request.run, request.stage, uids))

    async def Fail(self, request: pb.FailRequest, context: Context) -> Ack:
        require_stage(request.stage)
        [(uid, token)] = codec.decode_held_rows([request.row]).items()
        outcome = codec.decode_outcome(request.outcome)
        await self._queue.fail(request.run, request.stage, uid, token, outcome, request.reason)
        return Ack()

    async def Release(self, request: pb.ReleaseRequest, context: Context) -> Ack:
        require_stage(request.stage)
        token_of = codec.decode_held_rows(request.rows)
        await self._queue.release(request.run, request.stage, token_of)
        return Ack()

    async def Take(self, request: pb.TakeRequest, context: Context) -> pb.Batch:
        batch = await self._queue.take(
            request.run,
            epoch=request.epoch,
            step=request.step,
            groups=request.groups,
            batch_id=request.batch_id,
            wait_s=bounded(request.wait_s),
        )
        return codec.encode_batch(batch)

    async def Fetch(  # type: ignore[override]  # payload beside the message
        self, request: pb.FetchRowsRequest, context: Context
    ) -> AsyncIterator[codec.Bulk[pb.FetchRowsResponse]]:
        asked = codec.decode_rows(request.rows)
        blocks = await self._queue.fetch(request.run, asked, list(request.columns))
        for message in self._bulk(codec.encode_fetched(blocks), context):
            yield message

    async def Filter(self, request: pb.FilterRowsRequest, context: Context) -> Ack:
        uids = codec.decode_uids(request.uids)
        await self._queue.filter(request.run, epoch=request.epoch, uids=uids, reason=request.reason)
        return Ack()

    async def Settle(self, request: pb.SettleRequest, context: Context) -> Ack:
        await self._queue.settle(
            request.run, epoch=request.epoch, step=request.step, batch_id=request.batch_id
        )
        return Ack()

    async def Publish(self, request: pb.PublishVersionRequest, context: Context) -> Ack:
        await self._queue.publish(request.run, codec.VERSION.decode(request.version))
        return Ack()

    async def Commit(self, request: pb.CommitStepRequest, context: Context) -> Ack:
        await self._queue.commit(request.run, epoch=request.epoch, step=request.step)
        return Ack()

    async def Rewind(self, request: pb.RewindRequest, context: Context) -> pb.RewindResponse:
        rows = await self._queue.rewind(request.run, epoch=request.epoch, step=request.step)
        return pb.RewindResponse(rows=rows)

    async def GetLedger(self, request: pb.RunRequest, context: Context) -> pb.Ledger:
        return codec.LEDGER.encode(await self._queue.ledger(request.run))

    async def ListDeadLetters(self, request: pb.RunRequest, context: Context) -> pb.DeadLetters:
        letters = await self._queue.dead_letters(request.run)
        return pb.DeadLetters(letters=map(codec.DEAD_LETTER.encode, letters))

    async def Replay(self, request: pb.ReplayRequest, context: Context) -> pb.ReplayResponse:
        uids = codec.decode_uids(request.uids)
        return pb.ReplayResponse(rows=await self._queue.replay(request.run, uids))

    async def WhyWaiting(self, request: pb.RunRequest, context: Context) -> pb.WaitingList:
        waits = await self._queue.why_waiting(request.run)
        return pb.WaitingList(waits=map(codec.WAITING.encode, waits))

    @staticmethod
    def _bulk(messages: Iterable[codec.Bulk[M]], context: Context) -> Iterator[codec.Bulk[M]]:
        """Compress the frames if the caller accepts that."""
        if TAKES_COMPRESSED in (context.invocation_metadata() or ()):
            return (message.compressed() for message in messages)
        return iter(messages)
