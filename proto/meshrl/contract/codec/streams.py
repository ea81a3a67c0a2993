"""What the queue streams: admitted tasks, leases, writes, fetched rows. Each is a list of messages.

The first message of a stream, and only the first, has a header that counts what follows, so that a stream that was
cut short is never mistaken for a short one. Payload travels in the frames in which it was packed (bulk.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from meshrl.contract.codec.bulk import Bulk, pages
from meshrl.contract.codec.control import decoder, encoder, malformed
from meshrl.contract.codec.rows import (
    decode_facts,
    decode_parts,
    encode_facts,
    encode_parts,
    encode_rows,
    named_rows,
    per_group,
)
from meshrl.contract.codec.types import TASK, unpack_task
from meshrl.contract.frames import Frame
from meshrl.contract.types import Lease, LeasedBlock, PackedTask, RowBlock, RowFacts, Task
from meshrl.v1 import queue_pb2 as pb
from meshrl.v1 import trajectory_pb2


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmitCall:
    """The arguments of `Queue.admit`."""

    run: str
    tasks: tuple[Task, ...]
    cursor: str
    wait_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteCall:
    """The arguments of `Queue.write`, and of `append`, whose blocks have starts."""

    run: str
    stage: str
    blocks: tuple[RowBlock, ...]


@encoder
def encode_admit(call: AdmitCall) -> list[pb.AdmitRequest]:
    """Raises UserError for a task whose ground truth or extra info is not JSON."""
    tasks = map(TASK.encode, call.tasks)
    messages = [pb.AdmitRequest(tasks=page) for page in pages(trajectory_pb2.Task.ByteSize, tasks)]
    header = pb.AdmitHeader(
        run=call.run, cursor=call.cursor, wait_s=call.wait_s, num_tasks=len(call.tasks)
    )
    messages[0].header.CopyFrom(header)
    return messages


@decoder
def decode_admit(messages: Sequence[pb.AdmitRequest]) -> AdmitCall:
    """Raises UserError."""
    header = _header(messages)
    tasks = tuple(
        [
            TASK.decode(task).came_as(task.SerializeToString())
            for message in messages
            for task in message.tasks
        ]
    )
    if len(tasks) != header.num_tasks:
        malformed(f"{header.num_tasks} tasks were announced, {len(tasks)} came")
    return AdmitCall(run=header.run, tasks=tasks, cursor=header.cursor, wait_s=header.wait_s)


@encoder
def encode_lease(lease: Lease) -> list[Bulk[pb.LeaseResponse]]:
    """Rows with their tasks and the columns that the stage reads."""
    messages = [
        Bulk(
            pb.LeaseResponse(
                prompts=[block.packed.data for block in page],
                rows=encode_rows(page),
                tokens=[block.token for block in page],
                deliveries=chain.from_iterable([block.deliveries for block in page]),
                parts=encode_parts(page, [block.frames for block in page]),
                journal=encode_parts(page, [block.progress for block in page]),
            ),
            [
                *(frame.value for block in page for frame in block.frames),
                *(frame.value for block in page for frame in block.progress),
            ],
        )
        for page in pages(
            lambda block: (
                len(block.packed.data) + _frame_bytes(block.frames) + _frame_bytes(block.progress)
            ),
            lease.blocks,
        )
    ]
    header = pb.LeaseHeader(
        stage=lease.stage, worker=lease.worker, ttl_s=lease.ttl_s, num_groups=len(lease.blocks)
    )
    messages[0].message.header.CopyFrom(header)
    return messages


@decoder
def decode_lease(messages: Sequence[Bulk[pb.LeaseResponse]]) -> Lease:
    """Raises UserError."""
    header = _header([bulk.message for bulk in messages])
    leased: list[LeasedBlock] = []
    for bulk in messages:
        message, frames = bulk.message, bulk.frames
        rows = named_rows(message.rows)
        if not len(message.tokens) == len(message.prompts) == len(rows.tasks):
            counts = f"{len(message.tokens)} tokens, {len(message.prompts)} prompts"
            malformed(f"{len(rows.tasks)} groups with {counts}")
        num_parts = len(message.parts.sizes)
        columns = (
            rows.tasks,
            rows.indices,
            rows.attempts,
            message.prompts,
            message.tokens,
            per_group(message.deliveries, rows.counts, "deliveries"),
            decode_parts(message.parts, frames[:num_parts], rows),
            decode_parts(message.journal, frames[num_parts:], rows),
        )
        leased += [
            LeasedBlock(
                task=task,
                indices=indices,
                attempts=attempts,
                frames=own,
                token=token,
                deliveries=deliveries,
                packed=PackedTask(prompt, unpack_task),
                progress=progress,
            )
            for task, indices, attempts, prompt, token, deliveries, own, progress in zip(
                *columns, strict=True
            )
        ]
    if len(leased) != header.num_groups:
        malformed(f"{header.num_groups} groups were announced, {len(leased)} came")
    return Lease(stage=header.stage, worker=header.worker, ttl_s=header.ttl_s, blocks=tuple(leased))


@encoder
def encode_write(call: WriteCall) -> list[Bulk[pb.WriteRequest]]:
    """Any blocks; their frames are packed already."""
    messages = [
        Bulk(
            pb.WriteRequest(
                rows=encode_rows(page),
                tokens=[block.token for block in page],
                facts=encode_facts([block.facts for block in page]),
                starts=chain.from_iterable([block.starts for block in page]),
            ),
            [block.frame.value for block in page],
        )
        for page in pages(lambda block: len(block.frame.value), call.blocks)
    ]
    header = pb.WriteHeader(run=call.run, stage=call.stage, num_groups=len(call.blocks))
    messages[0].message.header.CopyFrom(header)
    return messages


@decoder
def decode_write(messages: Sequence[Bulk[pb.WriteRequest]]) -> WriteCall:
    """Raises UserError. The queue checks the frames; they are copies, which keep no message in memory."""
    header = _header([bulk.message for bulk in messages])
    written: list[RowBlock] = []
    for bulk in messages:
        message, frames = bulk.message, bulk.frames
        rows = named_rows(message.rows)
        if not len(message.tokens) == len(frames) == len(rows.tasks):
            counts = f"{len(message.tokens)} tokens, {len(frames)} frames"
            malformed(f"{len(rows.tasks)} groups with {counts}")
        facts: list[tuple[RowFacts, ...]] = [()] * len(frames)
        if message.HasField("facts"):
            facts = decode_facts(message.facts, rows.counts)
        starts: list[tuple[int, ...]] = [()] * len(frames)
        if message.starts:
            starts = per_group(message.starts, rows.counts, "starts")
        written += [
            RowBlock(
                task=task,
                indices=indices,
                attempts=attempts,
                token=token,
                frames=(Frame(bytes(frame)),),
                facts=of_facts,
                starts=of_starts,
            )
            for task, indices, attempts, token, frame, of_facts, of_starts in zip(
                rows.tasks,
                rows.indices,
                rows.attempts,
                message.tokens,
                frames,
                facts,
                starts,
                strict=True,
            )
        ]
    if len(written) != header.num_groups:
        malformed(f"{header.num_groups} groups were announced, {len(written)} came")
    return WriteCall(run=header.run, stage=header.stage, blocks=tuple(written))


def encode_fetched(
    blocks: Sequence[RowBlock], announced: int | None = None
) -> Iterator[Bulk[pb.FetchRowsResponse]]:
    """Make an answer, or a piece of one, message by message: a batch's payload is never in memory twice.

    Args:
        blocks: The payload of the piece.
        announced: Groups of the whole answer, in its first piece, and 0 in each other one; by default the blocks.
    """
    announced = len(blocks) if announced is None else announced
    for number, page in enumerate(pages(lambda block: _frame_bytes(block.frames), blocks)):
        message = pb.FetchRowsResponse(
            num_groups=0 if number else announced,
            rows=encode_rows(page),
            parts=encode_parts(page, [block.frames for block in page]),
        )
        yield Bulk(message, [frame.value for block in page for frame in block.frames])


@decoder
def decode_fetched(
    messages: Sequence[Bulk[pb.FetchRowsResponse]], asked: Sequence[RowBlock]
) -> list[RowBlock]:
    """The payload of `asked`, in order; raises UserError when the answer holds other rows."""
    found: list[RowBlock] = []
    for bulk in messages:
        rows = named_rows(bulk.message.rows)
        every = decode_parts(bulk.message.parts, bulk.frames, rows)
        found += [
            RowBlock(task=task, indices=indices, attempts=attempts, frames=frames)
            for task, indices, attempts, frames in zip(
                rows.tasks, rows.indices, rows.attempts, every, strict=True
            )
        ]
    announced = messages[0].message.num_groups if messages else 0
    if len(found) != announced:
        malformed(f"{announced} groups were announced, {len(found)} came")
    for block, wanted in zip(found, asked, strict=True):
        if (block.task, block.indices, block.attempts) != (
            wanted.task,
            wanted.indices,
            wanted.attempts,
        ):
            malformed("the rows are not the ones that were asked for")
    return found


def _frame_bytes(frames: Sequence[Frame]) -> int:
    return sum([len(frame.value) for frame in frames])


def _header(messages: Sequence[Any]) -> Any:
    if not messages or not messages[0].HasField("header"):
        malformed("the first message has no header")
    return messages[0].header
