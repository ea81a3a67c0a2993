"""What the queue streams: admitted tasks, leases, writes, fetched rows. A noun is a list of messages here.

The first message of a stream, and only the first, has a header that counts what follows, so that a stream that was
cut short is never taken for a short one. Payload travels in the frames in which it was packed, uncopied (bulk.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from meshrl.contract.codec.bulk import Bulk, Frame, bulk_pages
from meshrl.contract.codec.checks import decoder, encoder, malformed, require
from meshrl.contract.codec.nouns import decode_task, encode_task
from meshrl.contract.codec.pages import pages
from meshrl.contract.codec.siblings import (
    decode_facts,
    decode_siblings,
    encode_facts,
    encode_siblings,
)
from meshrl.contract.nouns import (
    JournalGroup,
    Lease,
    LeasedGroup,
    PackedGroup,
    Part,
    PayloadGroup,
    Siblings,
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
    """The arguments of `Queue.write_packed`, and of `append`, whose groups are of JournalGroup."""

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
    tasks = tuple(decode_task(task) for message in messages for task in message.tasks)
    _count("tasks", header.num_tasks, len(tasks))
    return AdmitCall(run=header.run, tasks=tasks, cursor=header.cursor, wait_s=header.wait_s)


@encoder
def encode_lease(lease: Lease) -> list[Bulk[pb.LeaseResponse]]:
    """Rows with their tasks and the columns that the stage reads."""
    items = (
        (_leased_group(group), _frames((*group.parts, *group.journal))) for group in lease.groups
    )
    messages = [
        Bulk(pb.LeaseResponse(groups=groups), frames) for groups, frames in bulk_pages(items)
    ]
    header = pb.LeaseHeader(
        stage=lease.stage, worker=lease.worker, ttl_s=lease.ttl_s, num_groups=len(lease.groups)
    )
    messages[0].message.header.CopyFrom(header)
    return messages


def _leased_group(group: LeasedGroup) -> pb.LeasedGroup:
    return pb.LeasedGroup(
        prompt=encode_task(group.prompt),
        indices=group.indices,
        attempts=group.attempts,
        token=group.token,
        deliveries=group.deliveries,
        parts=_parts(group.parts),
        journal=_parts(group.journal),
    )


def _parts(parts: Sequence[Part]) -> list[pb.Part]:
    return [pb.Part(rows=part.rows) for part in parts]


def _frames(parts: Sequence[Part]) -> list[Frame]:
    return [part.frame for part in parts]


def _frames_of(messages: Iterable[Bulk[Any]]) -> Iterator[Frame]:
    return chain.from_iterable(message.frames for message in messages)


def _finished(frames: Iterator[Frame]) -> None:
    if next(frames, None) is not None:
        malformed("more frames than groups speak of")


def _next(frames: Iterator[Frame]) -> Frame:
    frame = next(frames, None)
    if frame is None:
        malformed("fewer frames than groups speak of")
    return frame


@decoder
def decode_lease(messages: Sequence[Bulk[pb.LeaseResponse]]) -> Lease:
    """Raises UserError."""
    if not messages or not messages[0].message.HasField("header"):
        malformed("the first message has no header")
    header = messages[0].message.header
    frames = _frames_of(messages)
    groups = tuple(_decode_leased(group, frames) for m in messages for group in m.message.groups)
    _finished(frames)
    _count("groups", header.num_groups, len(groups))
    return Lease(stage=header.stage, worker=header.worker, ttl_s=header.ttl_s, groups=groups)


def _decode_leased(message: pb.LeasedGroup, frames: Iterator[Frame]) -> LeasedGroup:
    require(message, "prompt")
    prompt = decode_task(message.prompt)
    rows = decode_siblings(
        pb.Siblings(task=prompt.task_id, indices=message.indices, attempts=message.attempts)
    )
    if len(message.deliveries) != len(rows):
        malformed(f"{len(rows)} rows with {len(message.deliveries)} deliveries")
    return LeasedGroup(
        task=rows.task,
        indices=rows.indices,
        attempts=rows.attempts,
        parts=_decode_parts(message.parts, frames, len(rows)),
        token=message.token,
        deliveries=tuple(message.deliveries),
        prompt=prompt,
        journal=_decode_parts(message.journal, frames, len(rows)),
    )


def _decode_parts(
    messages: Sequence[pb.Part], frames: Iterator[Frame], rows: int
) -> tuple[Part, ...]:
    parts = tuple(Part(rows=tuple(message.rows), frame=_next(frames)) for message in messages)
    for part in parts:
        if any(not 0 <= row < rows for row in part.rows):
            malformed(f"a frame with columns of rows {part.rows} for a group of {rows} rows")
    return parts


@encoder
def encode_write(call: WriteCall) -> list[Bulk[pb.WriteRequest]]:
    """Any groups: frames are packed already."""
    items = ((_written_group(group), [group.frame]) for group in call.groups)
    messages = [
        Bulk(pb.WriteRequest(groups=groups), frames) for groups, frames in bulk_pages(items)
    ]
    header = pb.WriteHeader(run=call.run, stage=call.stage, num_groups=len(call.groups))
    messages[0].message.header.CopyFrom(header)
    return messages


def _written_group(group: PackedGroup) -> pb.WrittenGroup:
    return pb.WrittenGroup(
        rows=encode_siblings(group),
        token=group.token,
        facts=encode_facts(group.facts) if group.facts else None,
        starts=group.starts if isinstance(group, JournalGroup) else (),
    )


@decoder
def decode_write(messages: Sequence[Bulk[pb.WriteRequest]]) -> WriteCall:
    """Raises UserError; frames are looked into by the queue."""
    if not messages or not messages[0].message.HasField("header"):
        malformed("the first message has no header")
    header = messages[0].message.header
    frames = _frames_of(messages)
    groups = tuple(_decode_written(group, frames) for m in messages for group in m.message.groups)
    _finished(frames)
    _count("groups", header.num_groups, len(groups))
    return WriteCall(run=header.run, stage=header.stage, groups=groups)


def _decode_written(message: pb.WrittenGroup, frames: Iterator[Frame]) -> PackedGroup:
    require(message, "rows")
    rows = decode_siblings(message.rows)
    group = PackedGroup(
        task=rows.task,
        indices=rows.indices,
        attempts=rows.attempts,
        token=message.token,
        frame=bytes(_next(frames)),
        facts=decode_facts(message.facts) if message.HasField("facts") else (),
    )
    if not message.starts:
        return group
    if len(message.starts) != len(rows):
        malformed(f"{len(rows)} rows with {len(message.starts)} starts")
    return JournalGroup(**vars(group), starts=tuple(message.starts))


def encode_fetched(groups: Sequence[PayloadGroup]) -> Iterator[Bulk[pb.FetchRowsResponse]]:
    """Made message by message, so that a batch's payload is never in memory twice."""
    items = (
        (
            pb.PayloadGroup(rows=encode_siblings(group), parts=_parts(group.parts)),
            _frames(group.parts),
        )
        for group in groups
    )
    for number, (page, frames) in enumerate(bulk_pages(items)):
        announced = 0 if number else len(groups)
        yield Bulk(pb.FetchRowsResponse(num_groups=announced, groups=page), frames)


@decoder
def decode_fetched(
    messages: Sequence[Bulk[pb.FetchRowsResponse]], asked: Sequence[Siblings]
) -> list[PayloadGroup]:
    """The payload of `asked`, in order; raises UserError when the answer is about other rows."""
    frames = _frames_of(messages)
    found = [_decode_payload(group, frames) for m in messages for group in m.message.groups]
    _finished(frames)
    _count("groups", messages[0].message.num_groups if messages else 0, len(found))
    for group, wanted in zip(found, asked, strict=True):
        if (group.task, group.indices, group.attempts) != (
            wanted.task,
            wanted.indices,
            wanted.attempts,
        ):
            malformed("the rows are not the ones that were asked for")
    return found


def _decode_payload(message: pb.PayloadGroup, frames: Iterator[Frame]) -> PayloadGroup:
    require(message, "rows")
    rows = decode_siblings(message.rows)
    return PayloadGroup(
        task=rows.task,
        indices=rows.indices,
        attempts=rows.attempts,
        parts=_decode_parts(message.parts, frames, len(rows)),
    )
