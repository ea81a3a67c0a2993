"""What the queue streams: admitted tasks, leases, writes, fetched rows. Each is a list of messages.

The first message of a stream, and only the first, has a header that counts what follows, so that a stream that was
cut short is never mistaken for a short one. Payload travels in the frames in which it was packed, uncopied (bulk.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from meshrl.contract.codec.bulk import Bulk, Frame, pages, pages_by
from meshrl.contract.codec.checks import decoder, encoder, malformed
from meshrl.contract.codec.rows import (
    decode_facts,
    decode_parts,
    encode_facts,
    encode_parts,
    encode_rows,
    named_rows,
    next_frame,
    per_group,
)
from meshrl.contract.codec.types import decode_task, encode_task, packed_task
from meshrl.contract.types import (
    GroupRows,
    Lease,
    LeasedGroup,
    PackedGroup,
    PayloadGroup,
    ProgressGroup,
    RowFacts,
    Task,
)
from meshrl.v1 import queue_pb2 as pb


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmitCall:
    """The arguments of `Queue.admit`."""

    run: str
    tasks: tuple[Task, ...]
    cursor: str
    wait_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteCall:
    """The arguments of `Queue.write_packed`, and of `append`, whose groups are of ProgressGroup."""

    run: str
    stage: str
    groups: tuple[PackedGroup, ...]


def _count(what: str, announced: int, found: int) -> None:
    if announced != found:
        malformed(f"{announced} {what} were announced, {found} came")


@encoder
def encode_admit(call: AdmitCall) -> list[pb.AdmitRequest]:
    """Raises UserError for a task whose ground truth or extra info is not JSON."""
    messages = [pb.AdmitRequest(tasks=page) for page in pages(map(encode_task, call.tasks))]
    header = pb.AdmitHeader(
        run=call.run, cursor=call.cursor, wait_s=call.wait_s, num_tasks=len(call.tasks)
    )
    messages[0].header.CopyFrom(header)
    return messages


@decoder
def decode_admit(messages: Sequence[pb.AdmitRequest]) -> AdmitCall:
    """Raises UserError."""
    if not messages or not messages[0].HasField("header"):
        malformed("the first message has no header")
    header = messages[0].header
    tasks = tuple(
        [
            decode_task(task).came_as(task.SerializeToString())
            for message in messages
            for task in message.tasks
        ]
    )
    _count("tasks", header.num_tasks, len(tasks))
    return AdmitCall(run=header.run, tasks=tasks, cursor=header.cursor, wait_s=header.wait_s)


@encoder
def encode_lease(lease: Lease) -> list[Bulk[pb.LeaseResponse]]:
    """Rows with their tasks and the columns that the stage reads."""
    messages = [
        Bulk(
            pb.LeaseResponse(
                prompts=[group.packed.data for group in groups],
                rows=encode_rows(groups),
                tokens=[group.token for group in groups],
                deliveries=chain.from_iterable([group.deliveries for group in groups]),
                parts=encode_parts([group.parts for group in groups]),
                journal=encode_parts([group.progress for group in groups]),
            ),
            [
                *(part.frame for group in groups for part in group.parts),
                *(part.frame for group in groups for part in group.progress),
            ],
        )
        for groups in pages_by(_leased_bytes, lease.groups)
    ]
    header = pb.LeaseHeader(
        stage=lease.stage, worker=lease.worker, ttl_s=lease.ttl_s, num_groups=len(lease.groups)
    )
    messages[0].message.header.CopyFrom(header)
    return messages


def _leased_bytes(group: LeasedGroup) -> int:
    frames = sum([len(part.frame) for part in (*group.parts, *group.progress)])
    return len(group.packed.data) + frames


@decoder
def decode_lease(messages: Sequence[Bulk[pb.LeaseResponse]]) -> Lease:
    """Raises UserError."""
    header = _header(messages)
    groups = tuple(chain.from_iterable(map(_decode_leased, messages)))
    _count("groups", header.num_groups, len(groups))
    return Lease(stage=header.stage, worker=header.worker, ttl_s=header.ttl_s, groups=groups)


def _decode_leased(bulk: Bulk[pb.LeaseResponse]) -> Iterator[LeasedGroup]:
    message, frames = bulk.message, iter(bulk.frames)
    rows = named_rows(message.rows)
    groups = len(rows.tasks)
    if not len(message.tokens) == len(message.prompts) == groups:
        malformed(
            f"{groups} groups with {len(message.tokens)} tokens, {len(message.prompts)} prompts"
        )
    columns = (
        *(rows.tasks, rows.indices, rows.attempts),
        map(packed_task, message.prompts),
        message.tokens,
        per_group(message.deliveries, rows.counts, "deliveries"),
        decode_parts(message.parts, frames, rows),
        decode_parts(message.journal, frames, rows),
    )
    _finished(frames)
    for task, indices, attempts, prompt, token, deliveries, parts, progress in zip(
        *columns, strict=True
    ):
        yield LeasedGroup(
            task=task,
            indices=indices,
            attempts=attempts,
            parts=parts,
            token=token,
            deliveries=deliveries,
            packed=prompt,
            progress=progress,
        )


@encoder
def encode_write(call: WriteCall) -> list[Bulk[pb.WriteRequest]]:
    """Any groups; their frames are packed already."""
    messages = [
        Bulk(
            pb.WriteRequest(
                rows=encode_rows(groups),
                tokens=[group.token for group in groups],
                facts=encode_facts([group.facts for group in groups]),
                starts=chain.from_iterable(
                    [group.starts for group in groups if isinstance(group, ProgressGroup)]
                ),
            ),
            [group.frame for group in groups],
        )
        for groups in pages_by(lambda group: len(group.frame), call.groups)
    ]
    header = pb.WriteHeader(run=call.run, stage=call.stage, num_groups=len(call.groups))
    messages[0].message.header.CopyFrom(header)
    return messages


@decoder
def decode_write(messages: Sequence[Bulk[pb.WriteRequest]]) -> WriteCall:
    """Raises UserError. The queue checks the frames."""
    header = _header(messages)
    groups = tuple(chain.from_iterable(map(_decode_written, messages)))
    _count("groups", header.num_groups, len(groups))
    return WriteCall(run=header.run, stage=header.stage, groups=groups)


def _decode_written(bulk: Bulk[pb.WriteRequest]) -> Sequence[PackedGroup]:
    message, frames = bulk.message, iter(bulk.frames)
    rows = named_rows(message.rows)
    if len(message.tokens) != len(rows.tasks):
        malformed(f"{len(rows.tasks)} groups with {len(message.tokens)} tokens")
    facts: list[tuple[RowFacts, ...]] = [()] * len(rows.tasks)
    if message.HasField("facts"):
        facts = decode_facts(message.facts, rows.counts)
    columns = (rows.tasks, rows.indices, rows.attempts, message.tokens, facts)
    groups = [
        PackedGroup(
            task=task,
            indices=indices,
            attempts=attempts,
            token=token,
            frame=bytes(next_frame(frames)),
            facts=of_rows,
        )
        for task, indices, attempts, token, of_rows in zip(*columns, strict=True)
    ]
    _finished(frames)
    if not message.starts:
        return groups
    every = per_group(message.starts, rows.counts, "starts")
    return [
        ProgressGroup(**vars(group), starts=starts)
        for group, starts in zip(groups, every, strict=True)
    ]


def encode_fetched(groups: Sequence[PayloadGroup]) -> Iterator[Bulk[pb.FetchRowsResponse]]:
    """Made message by message, so that a batch's payload is never in memory twice."""
    for number, page in enumerate(pages_by(_payload_bytes, groups)):
        message = pb.FetchRowsResponse(
            num_groups=0 if number else len(groups),
            rows=encode_rows(page),
            parts=encode_parts([group.parts for group in page]),
        )
        yield Bulk(message, [part.frame for group in page for part in group.parts])


def _payload_bytes(group: PayloadGroup) -> int:
    return sum([len(part.frame) for part in group.parts])


@decoder
def decode_fetched(
    messages: Sequence[Bulk[pb.FetchRowsResponse]], asked: Sequence[GroupRows]
) -> list[PayloadGroup]:
    """The payload of `asked`, in order; raises UserError when the answer holds other rows."""
    found = list(chain.from_iterable(map(_decode_payload, messages)))
    _count("groups", messages[0].message.num_groups if messages else 0, len(found))
    for group, wanted in zip(found, asked, strict=True):
        if (group.task, group.indices, group.attempts) != (
            wanted.task,
            wanted.indices,
            wanted.attempts,
        ):
            malformed("the rows are not the ones that were asked for")
    return found


def _decode_payload(bulk: Bulk[pb.FetchRowsResponse]) -> Iterator[PayloadGroup]:
    message, frames = bulk.message, iter(bulk.frames)
    rows = named_rows(message.rows)
    every = decode_parts(message.parts, frames, rows)
    _finished(frames)
    for task, indices, attempts, parts in zip(
        *(rows.tasks, rows.indices, rows.attempts, every), strict=True
    ):
        yield PayloadGroup(task=task, indices=indices, attempts=attempts, parts=parts)


def _header(messages: Sequence[Bulk[Any]]) -> Any:
    if not messages or not messages[0].message.HasField("header"):
        malformed("the first message has no header")
    return messages[0].message.header


def _finished(frames: Iterator[Frame]) -> None:
    if next(frames, None) is not None:
        malformed("more frames than groups speak of")
