"""What the queue streams: admitted tasks, leases, writes, fetched rows. A noun is a list of messages here.

The first message of a stream, and only the first, has a header that counts what follows, so that a stream that was
cut short is never taken for a short one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from meshrl.contract.codec.checks import decoder, encoder, malformed
from meshrl.contract.codec.nouns import (
    decode_row_facts,
    decode_task,
    encode_row_facts,
    encode_task,
)
from meshrl.contract.codec.payload import Payload, chunks, decode_row, encode_row
from meshrl.contract.nouns import Columns, Lease, LeasedRow, RowWrite, Task, Uid
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
    """The arguments of `Queue.write`."""

    run: str
    stage: str
    token_of: Mapping[Uid, int]
    rows: tuple[RowWrite, ...]


def _count(what: str, announced: int, found: int) -> None:
    if announced != found:
        malformed(f"{announced} {what} were announced, {found} came")


@encoder
def encode_admit(call: AdmitCall) -> list[pb.AdmitRequest]:
    """Raises UserError for a task whose ground truth or extra info is not JSON."""
    pieces = chunks((encode_task(task), ()) for task in call.tasks)
    messages = [pb.AdmitRequest(tasks=tasks) for tasks, _ in pieces]
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
    messages = [
        pb.LeaseResponse(rows=rows, payload=payload)
        for rows, payload in chunks(map(_leased_row, lease.rows))
    ]
    header = pb.LeaseHeader(
        stage=lease.stage, worker=lease.worker, ttl_s=lease.ttl_s, num_rows=len(lease.rows)
    )
    messages[0].header.CopyFrom(header)
    return messages


def _leased_row(row: LeasedRow) -> tuple[pb.LeasedRow, list[memoryview]]:
    header, views = encode_row(row.uid, row.columns)
    task = encode_task(row.task)
    return pb.LeasedRow(row=header, token=row.token, task=task, delivery=row.delivery), views


@decoder
def decode_lease(messages: Sequence[pb.LeaseResponse]) -> Lease:
    """Raises UserError."""
    if not messages or not messages[0].HasField("header"):
        malformed("the first message has no header")
    header = messages[0].header
    payload = Payload(message.payload for message in messages)
    rows = []
    for message in chain.from_iterable(m.rows for m in messages):
        uid, columns = decode_row(message.row, payload)
        rows.append(
            LeasedRow(
                uid=uid,
                token=message.token,
                task=decode_task(message.task),
                columns=columns,
                delivery=message.delivery,
            )
        )
    payload.finish()
    _count("rows", header.num_rows, len(rows))
    return Lease(stage=header.stage, worker=header.worker, ttl_s=header.ttl_s, rows=tuple(rows))


@encoder
def encode_write(call: WriteCall) -> list[pb.WriteRequest]:
    """Raises UserError for a column whose dtype may not travel."""
    written = (_written_row(row, call.token_of.get(row.uid)) for row in call.rows)
    messages = [pb.WriteRequest(rows=rows, payload=payload) for rows, payload in chunks(written)]
    header = pb.WriteHeader(run=call.run, stage=call.stage, num_rows=len(call.rows))
    messages[0].header.CopyFrom(header)
    return messages


def _written_row(row: RowWrite, token: int | None) -> tuple[pb.WrittenRow, list[memoryview]]:
    header, views = encode_row(row.uid, row.columns)
    facts = encode_row_facts(row.facts) if row.facts else None
    return pb.WrittenRow(row=header, token=token, facts=facts), views


@decoder
def decode_write(messages: Sequence[pb.WriteRequest]) -> WriteCall:
    """Raises UserError."""
    if not messages or not messages[0].HasField("header"):
        malformed("the first message has no header")
    header = messages[0].header
    payload = Payload(message.payload for message in messages)
    rows = []
    token_of = {}
    for message in chain.from_iterable(m.rows for m in messages):
        uid, columns = decode_row(message.row, payload)
        facts = decode_row_facts(message.facts) if message.HasField("facts") else None
        rows.append(RowWrite(uid=uid, columns=columns, facts=facts))
        if message.HasField("token"):
            token_of[uid] = message.token
    payload.finish()
    _count("rows", header.num_rows, len(rows))
    return WriteCall(run=header.run, stage=header.stage, token_of=token_of, rows=tuple(rows))


def encode_fetched(
    uids: Sequence[Uid], fetched: Sequence[Columns]
) -> Iterator[pb.FetchRowsResponse]:
    """Made message by message, so that a batch's payload is never in memory twice."""
    rows = (encode_row(uid, columns) for uid, columns in zip(uids, fetched, strict=True))
    for number, (headers, payload) in enumerate(chunks(rows)):
        announced = 0 if number else len(uids)
        yield pb.FetchRowsResponse(num_rows=announced, rows=headers, payload=payload)


@decoder
def decode_fetched(messages: Sequence[pb.FetchRowsResponse], uids: Sequence[Uid]) -> list[Columns]:
    """The columns of `uids`, in order; raises UserError when the answer is about other rows."""
    payload = Payload(message.payload for message in messages)
    rows = [decode_row(row, payload) for row in chain.from_iterable(m.rows for m in messages)]
    payload.finish()
    _count("rows", messages[0].num_rows if messages else 0, len(rows))
    if [uid for uid, _ in rows] != list(uids):
        malformed("the rows are not the ones that were asked for")
    return [columns for _, columns in rows]
