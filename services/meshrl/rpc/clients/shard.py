"""The Shard port over gRPC: a QueueClient with the operations that a router needs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Unpack

from meshrl.contract import codec
from meshrl.contract.types import RunState, Task, Version
from meshrl.rpc.clients.base import discard
from meshrl.rpc.clients.queue import ClientOptions, QueueClient
from meshrl.transferqueue.sharding import (
    GroupCounts,
    RowCounts,
    Sampled,
    ShardCapacity,
    ShardNote,
)
from meshrl.v1 import queue_pb2
from meshrl.v1 import shard_pb2 as pb
from meshrl.v1 import shard_pb2_grpc as rpc


class ShardClient(QueueClient):
    """A remote Shard. Calls are repeated if the shard goes away before it answers."""

    def __init__(self, address: str, **options: Unpack[ClientOptions]) -> None:
        super().__init__(address, **options)
        self._shard = rpc.ShardStub(self._connection.channel)

    async def note(
        self, name: str, *, other_than: str | None = None, wait_s: float = 0.0
    ) -> ShardNote:
        """See Shard."""
        request = pb.NoteRequest(name=name, other_than=other_than)
        attempt = partial(self._connection.call, self._shard.Note, request, _note)
        return await self._connection.poll(request, attempt, wait_s)

    async def write_note(self, name: str, text: str, *, instead_of: str) -> None:
        """See Shard."""
        request = pb.WriteNoteRequest(name=name, text=text, instead_of=instead_of)
        await self._connection.call(self._shard.WriteNote, request, discard)

    async def follow(self, state: RunState, owner: str) -> None:
        """See Shard."""
        request = pb.FollowRequest(state=codec.encode_run_state(state), owner=owner)
        await self._connection.call(self._shard.Follow, request, discard)

    async def capacity(
        self,
        run: str,
        *,
        turn: str = "",
        tasks: Sequence[str] = (),
        fewer_than: int = -1,
        why: str = "",
        wait_s: float = 0.0,
    ) -> ShardCapacity:
        """See Shard."""
        request = pb.RoomRequest(
            run=run,
            turn=turn,
            tasks=tasks,
            fewer_than=fewer_than,
            why=why,
        )
        attempt = partial(self._connection.call, self._shard.Room, request, _room)
        return await self._connection.poll(request, attempt, wait_s)

    async def admit_in_turn(
        self, run: str, tasks: Sequence[Task], *, cursor: str | None, turn: str
    ) -> int:
        """See Shard."""
        call = codec.AdmitCall(run=run, tasks=tuple(tasks), cursor=cursor or "", wait_s=0.0)
        requests = [
            pb.AdmitInTurnRequest(turn=turn, move_cursor=cursor is not None, admit=part)
            for part in codec.encode_admit(call)
        ]
        return await self._connection.call_with_stream(
            self._shard.AdmitInTurn, requests, lambda answer: answer.admitted
        )

    async def groups(
        self,
        run: str,
        *,
        epoch: int,
        step: int,
        batch_id: str,
        groups: int,
        more_than: int = -1,
        done: bool = False,
        due_by: int = -1,
        unfinished: int = 0,
        why: str = "",
        wait_s: float = 0.0,
    ) -> GroupCounts:
        """See Shard."""
        request = pb.GroupsRequest(
            run=run,
            epoch=epoch,
            step=step,
            batch_id=batch_id,
            groups=groups,
            more_than=more_than,
            done=done,
            due_by=None if due_by < 0 else due_by,
            unfinished=unfinished,
            why=why,
        )
        attempt = partial(self._connection.call, self._shard.Groups, request, _groups)
        return await self._connection.poll(request, attempt, wait_s)

    async def plan_of(self, run: str, batch_id: str) -> str:
        """See Shard."""
        request = pb.PlanOfRequest(run=run, batch_id=batch_id)
        return await self._connection.call(self._shard.PlanOf, request, lambda answer: answer.plan)

    async def publish_and_tell(self, run: str, version: Version) -> str:
        """See Shard."""
        request = queue_pb2.PublishVersionRequest(run=run, version=codec.encode_version(version))
        return await self._connection.call(self._shard.PublishAndTell, request, _members)

    async def commit_and_tell(self, run: str, *, epoch: int, step: int) -> str:
        """See Shard."""
        request = queue_pb2.CommitStepRequest(run=run, epoch=epoch, step=step)
        return await self._connection.call(self._shard.CommitAndTell, request, _members)

    async def until_rows(
        self,
        runs: Sequence[str],
        stage: str,
        *,
        worker: str,
        limit: int,
        version: Version | None = None,
        wait_s: float,
    ) -> None:
        """See Shard."""
        request = pb.UntilRowsRequest(
            runs=runs,
            stage=stage,
            worker=worker,
            limit=limit,
            version=codec.encode_version(version) if version else None,
        )
        attempt = partial(self._connection.call, self._shard.UntilRows, request, discard)
        await self._connection.poll(request, attempt, wait_s)

    async def rows(
        self,
        runs: Sequence[str],
        stage: str,
        *,
        worker: str,
        unlike: Sequence[RowCounts] | None = None,
        why: str = "",
        wait_s: float = 0.0,
    ) -> Sequence[RowCounts]:
        """See Shard."""
        request = pb.RowsRequest(
            runs=runs,
            stage=stage,
            worker=worker,
            unlike=None if unlike is None else encode_rows(unlike),
            why=why,
        )
        attempt = partial(self._connection.call, self._shard.Rows, request, decode_rows)
        return await self._connection.poll(request, attempt, wait_s)


def _note(answer: pb.NoteResponse) -> ShardNote:
    return ShardNote(text=answer.text, runs=tuple(answer.runs))


def _members(answer: pb.ToldResponse) -> str:
    return answer.members


def _room(answer: pb.RoomResponse) -> ShardCapacity:
    return ShardCapacity(
        open_groups=answer.open_groups,
        open_bytes=answer.open_bytes,
        feed_closed=answer.feed_closed,
        known=frozenset(answer.known),
        members=answer.members,
    )


def _groups(answer: pb.GroupsResponse) -> GroupCounts:
    return GroupCounts(
        plan=answer.plan,
        replays=tuple((replay.round, replay.groups) for replay in answer.replays),
        fresh=answer.fresh,
        unfinished=answer.unfinished,
        feed_closed=answer.feed_closed,
        next_round=answer.next_round,
        sampled=tuple(
            Sampled(one.first, one.later, one.groups, one.complete) for one in answer.sampled
        ),
        waits_for_due=answer.waits_for_due,
        members=answer.members,
    )


def encode_rows(rows: Sequence[RowCounts]) -> pb.RowsResponse:
    """Encode the figures of several runs."""
    return pb.RowsResponse(
        runs=[
            pb.RowsResponse.Run(
                run=row.run,
                ready=row.ready,
                upstream=row.upstream,
                open_groups=row.open_groups,
                open_bytes=row.open_bytes,
                feed_closed=row.feed_closed,
                epoch=row.epoch,
                published=codec.encode_version(row.published),
            )
            for row in rows
        ]
    )


def decode_rows(message: pb.RowsResponse) -> list[RowCounts]:
    """The inverse of `encode_rows`."""
    return [
        RowCounts(
            run=row.run,
            ready=row.ready,
            upstream=row.upstream,
            open_groups=row.open_groups,
            open_bytes=row.open_bytes,
            feed_closed=row.feed_closed,
            epoch=row.epoch,
            published=codec.decode_version(row.published),
        )
        for row in message.runs
    ]
