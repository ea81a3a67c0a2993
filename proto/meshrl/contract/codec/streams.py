"""What the queue streams: admitted tasks, leases, writes, fetched rows. A noun is a list of messages here.

The first message of a stream, and only the first, has a header that counts what follows, so that a stream that was
cut short is never taken for a short one. Payload travels in the frames in which it was packed, undecoded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

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
    """The arguments of `Queue.write_packed`."""

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
def encode_lease(lease: Lease) -> list[pb.LeaseResponse]:
    """Rows with their tasks and the columns that the stage reads."""
    messages = [pb.LeaseResponse(groups=page) for page in pages(map(_leased_group, lease.groups))]
    header = pb.LeaseHeader(
        stage=lease.stage, worker=lease.worker, ttl_s=lease.ttl_s, num_groups=len(lease.groups)
    )
    messages[0].header.CopyFrom(header)
    return messages


def _leased_group(group: LeasedGroup) -> pb.LeasedGroup:
    return pb.LeasedGroup(
        prompt=encode_task(group.prompt),
        indices=group.indices,
        attempts=group.attempts,
        token=group.token,
        deliveries=group.deliveries,
        parts=_parts(group),
    )


def _parts(group: PayloadGroup) -> list[pb.Part]:
    return [pb.Part(rows=part.rows, frame=part.frame) for part in group.parts]


@decoder
def decode_lease(messages: Sequence[pb.LeaseResponse]) -> Lease:
    """Raises UserError."""
    if not messages or not messages[0].HasField("header"):
        malformed("the first message has no header")
    header = messages[0].header
    groups = tuple(_decode_leased(group) for message in messages for group in message.groups)
    _count("groups", header.num_groups, len(groups))
    return Lease(stage=header.stage, worker=header.worker, ttl_s=header.ttl_s, groups=groups)


def _decode_leased(message: pb.LeasedGroup) -> LeasedGroup:
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
        parts=_decode_parts(message.parts, len(rows)),
        token=message.token,
        deliveries=tuple(message.deliveries),
        prompt=prompt,
    )


def _decode_parts(messages: Sequence[pb.Part], rows: int) -> tuple[Part, ...]:
    parts = tuple(Part(rows=tuple(message.rows), frame=message.frame) for message in messages)
    for part in parts:
        if any(not 0 <= row < rows for row in part.rows):
            malformed(f"a frame with columns of rows {part.rows} for a group of {rows} rows")
    return parts


@encoder
def encode_write(call: WriteCall) -> list[pb.WriteRequest]:
    """Any groups: frames are packed already."""
    messages = [pb.WriteRequest(groups=page) for page in pages(map(_written_group, call.groups))]
    header = pb.WriteHeader(run=call.run, stage=call.stage, num_groups=len(call.groups))
    messages[0].header.CopyFrom(header)
    return messages


def _written_group(group: PackedGroup) -> pb.WrittenGroup:
    return pb.WrittenGroup(
        rows=encode_siblings(group),
        token=group.token,
        frame=group.frame,
        facts=encode_facts(group.facts) if group.facts else None,
    )


@decoder
def decode_write(messages: Sequence[pb.WriteRequest]) -> WriteCall:
    """Raises UserError; frames are looked into by the queue."""
    if not messages or not messages[0].HasField("header"):
        malformed("the first message has no header")
    header = messages[0].header
    groups = tuple(_decode_written(group) for message in messages for group in message.groups)
    _count("groups", header.num_groups, len(groups))
    return WriteCall(run=header.run, stage=header.stage, groups=groups)


def _decode_written(message: pb.WrittenGroup) -> PackedGroup:
    require(message, "rows")
    rows = decode_siblings(message.rows)
    return PackedGroup(
        task=rows.task,
        indices=rows.indices,
        attempts=rows.attempts,
        token=message.token,
        frame=message.frame,
        facts=decode_facts(message.facts) if message.HasField("facts") else (),
    )


def encode_fetched(groups: Sequence[PayloadGroup]) -> Iterator[pb.FetchRowsResponse]:
    """Made message by message, so that a batch's payload is never in memory twice."""
    payload = (
        pb.PayloadGroup(rows=encode_siblings(group), parts=_parts(group)) for group in groups
    )
    for number, page in enumerate(pages(payload)):
        yield pb.FetchRowsResponse(num_groups=0 if number else len(groups), groups=page)


@decoder
def decode_fetched(
    messages: Sequence[pb.FetchRowsResponse], asked: Sequence[Siblings]
) -> list[PayloadGroup]:
    """The payload of `asked`, in order; raises UserError when the answer is about other rows."""
    found = [_decode_payload(group) for group in chain.from_iterable(m.groups for m in messages)]
    _count("groups", messages[0].num_groups if messages else 0, len(found))
    for group, wanted in zip(found, asked, strict=True):
        if (group.task, group.indices, group.attempts) != (
            wanted.task,
            wanted.indices,
            wanted.attempts,
        ):
            malformed("the rows are not the ones that were asked for")
    return found


def _decode_payload(message: pb.PayloadGroup) -> PayloadGroup:
    require(message, "rows")
    rows = decode_siblings(message.rows)
    return PayloadGroup(
        task=rows.task,
        indices=rows.indices,
        attempts=rows.attempts,
        parts=_decode_parts(message.parts, len(rows)),
    )
