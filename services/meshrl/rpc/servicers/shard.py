"""Serves a Shard port to routers over gRPC. meshrl/v1/shard.proto describes each method."""
# ruff: noqa: D102

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Final

import grpc

from meshrl.contract import codec
from meshrl.contract.errors import UserError
from meshrl.rpc.clients.shard import decode_rows, encode_rows
from meshrl.rpc.credentials import MeshRole
from meshrl.rpc.identity import require, require_stage
from meshrl.rpc.interceptors import Context, bounded, collected, full_name
from meshrl.transferqueue.sharding import SHARD_LIST, Shard
from meshrl.v1 import queue_pb2
from meshrl.v1 import shard_pb2 as pb
from meshrl.v1 import shard_pb2_grpc as rpc
from meshrl.v1.trajectory_pb2 import Ack


class ShardServicer(rpc.ShardServicer):
    """Translates and delegates."""

    service: Final = full_name(pb.DESCRIPTOR, "Shard")
    waits: Final = frozenset({"Note", "Room", "Groups", "UntilRows", "Rows"})

    def __init__(self, shard: Shard) -> None:
        self._shard = shard

    def attach(self, server: grpc.aio.Server) -> None:
        rpc.add_ShardServicer_to_server(self, server)

    async def Note(self, request: pb.NoteRequest, context: Context) -> pb.NoteResponse:
        note = await self._shard.note(
            request.name,
            other_than=request.other_than if request.HasField("other_than") else None,
            wait_s=bounded(request.wait_s),
        )
        return pb.NoteResponse(text=note.text, runs=note.runs)

    async def WriteNote(self, request: pb.WriteNoteRequest, context: Context) -> Ack:
        if request.name == SHARD_LIST:
            require("the list of shards, which says where credentials are taken to,")
        await self._shard.write_note(request.name, request.text, instead_of=request.instead_of)
        return Ack()

    async def Follow(self, request: pb.FollowRequest, context: Context) -> Ack:
        await self._shard.follow(codec.decode_run_state(request.state), request.owner)
        return Ack()

    async def Room(self, request: pb.RoomRequest, context: Context) -> pb.RoomResponse:
        if request.turn:
            require("a turn to admit", MeshRole.FEEDER, MeshRole.TRAINER)
        capacity = await self._shard.capacity(
            request.run,
            turn=request.turn,
            tasks=list(request.tasks),
            fewer_than=request.fewer_than,
            why=request.why,
            wait_s=bounded(request.wait_s),
        )
        return pb.RoomResponse(
            open_groups=capacity.open_groups,
            open_bytes=capacity.open_bytes,
            feed_closed=capacity.feed_closed,
            known=capacity.known,
            members=capacity.members,
        )

    async def AdmitInTurn(
        self, request_iterator: AsyncIterator[pb.AdmitInTurnRequest], context: Context
    ) -> queue_pb2.AdmitResponse:
        messages = await collected(request_iterator)
        call = codec.decode_admit([message.admit for message in messages])
        if not messages[0].turn:
            raise UserError("admit in turn: turn is empty")
        cursor = call.cursor if messages[0].move_cursor else None
        admitted = await self._shard.admit_in_turn(
            call.run, call.tasks, cursor=cursor, turn=messages[0].turn
        )
        return queue_pb2.AdmitResponse(admitted=admitted)

    async def Groups(self, request: pb.GroupsRequest, context: Context) -> pb.GroupsResponse:
        groups = await self._shard.groups(
            request.run,
            epoch=request.epoch,
            step=request.step,
            batch_id=request.batch_id,
            groups=request.groups,
            more_than=request.more_than,
            done=request.done,
            due_by=request.due_by if request.HasField("due_by") else -1,
            unfinished=request.unfinished,
            why=request.why,
            wait_s=bounded(request.wait_s),
        )
        return pb.GroupsResponse(
            plan=groups.plan,
            replays=[
                pb.GroupsResponse.Replay(round=at, groups=count) for at, count in groups.replays
            ],
            fresh=groups.fresh,
            unfinished=groups.unfinished,
            feed_closed=groups.feed_closed,
            next_round=groups.next_round,
            sampled=[pb.GroupsResponse.Sampled(**one._asdict()) for one in groups.sampled],
            waits_for_due=groups.waits_for_due,
            members=groups.members,
        )

    async def PlanOf(self, request: pb.PlanOfRequest, context: Context) -> pb.PlanOfResponse:
        return pb.PlanOfResponse(plan=await self._shard.plan_of(request.run, request.batch_id))

    async def PublishAndTell(
        self, request: queue_pb2.PublishVersionRequest, context: Context
    ) -> pb.ToldResponse:
        version = codec.decode_version(request.version)
        return pb.ToldResponse(members=await self._shard.publish_and_tell(request.run, version))

    async def CommitAndTell(
        self, request: queue_pb2.CommitStepRequest, context: Context
    ) -> pb.ToldResponse:
        members = await self._shard.commit_and_tell(
            request.run, epoch=request.epoch, step=request.step
        )
        return pb.ToldResponse(members=members)

    async def UntilRows(self, request: pb.UntilRowsRequest, context: Context) -> Ack:
        require_stage(request.stage)
        await self._shard.until_rows(
            list(request.runs),
            request.stage,
            worker=request.worker,
            limit=request.limit,
            version=codec.decode_version(request.version) if request.HasField("version") else None,
            wait_s=bounded(request.wait_s),
        )
        return Ack()

    async def Rows(self, request: pb.RowsRequest, context: Context) -> pb.RowsResponse:
        require_stage(request.stage)
        rows = await self._shard.rows(
            list(request.runs),
            request.stage,
            worker=request.worker,
            unlike=decode_rows(request.unlike) if request.HasField("unlike") else None,
            why=request.why,
            wait_s=bounded(request.wait_s),
        )
        return encode_rows(rows)
