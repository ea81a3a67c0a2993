"""Streams of the queue: admitted tasks, leases, writes, fetched rows. Each is a list of messages.

The first message of a stream, and only the first, has a header that counts what follows, so that a stream that was
cut short is never mistaken for a short one. Payload travels in the frames in which it was packed (bulk.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain, islice
from typing import Any, NamedTuple, TypeVar

from meshrl.contract.codec.bulk import Bulk, pages
from meshrl.contract.codec.control import decoder, encoder, malformed, require
from meshrl.contract.codec.types import OUTCOMES, TASK, unpack_task
from meshrl.contract.frames import Frame
from meshrl.contract.types import (
    Batch,
    Lease,
    LeasedBlock,
    PackedTask,
    RowBlock,
    RowFacts,
    Task,
    Version,
)
from meshrl.v1 import queue_pb2 as pb
from meshrl.v1 import trajectory_pb2

T = TypeVar("T")

_facts = partial(tuple.__new__, RowFacts)
"""`RowFacts._make` in C: every row that is sampled comes by here."""


class Rows(NamedTuple):
    """Rows of several groups as a message names them: lists with an entry per group."""

    tasks: Sequence[str]
    counts: Sequence[int]
    """Rows of each group."""
    indices: Sequence[tuple[int, ...]]
    attempts: Sequence[tuple[int, ...]]


def per_group(values: Sequence[T], counts: Sequence[int], what: str) -> list[tuple[T, ...]]:
    """A list with an entry per row, cut into one tuple per group. Raises ValueError where it does not fit."""
    if len(values) != sum(counts):
        malformed(f"{sum(counts)} rows with {len(values)} {what}")
    entries = iter(values[:])
    return [tuple(islice(entries, count)) for count in counts]


@encoder
def encode_rows(blocks: Sequence[RowBlock]) -> pb.GroupRows:
    """The names of any rows."""
    return pb.GroupRows(
        tasks=[block.task for block in blocks],
        counts=[len(block.indices) for block in blocks],
        indices=chain.from_iterable([block.indices for block in blocks]),
        attempts=chain.from_iterable([block.attempts for block in blocks]),
    )


@decoder
def decode_rows(message: pb.GroupRows) -> list[RowBlock]:
    """Blocks of names alone. Raises UserError for rows that no uid can name."""
    rows = named_rows(message)
    return [
        RowBlock(task=task, indices=indices, attempts=attempts)
        for task, indices, attempts in zip(rows.tasks, rows.indices, rows.attempts, strict=True)
    ]


def named_rows(message: pb.GroupRows) -> Rows:
    """The rows of a message, before they become types. Raises ValueError for rows that no uid can name."""
    # Lists, because a protobuf container makes its numbers anew at each access.
    tasks, counts = message.tasks[:], message.counts[:]
    indices, attempts = message.indices[:], message.attempts[:]
    if len(tasks) != len(counts) or not all(tasks):
        malformed(f"{len(counts)} groups with {len(tasks)} task ids, or an empty one")
    if min(chain(counts, indices, attempts), default=0) < 0:
        malformed("a negative count, index or attempt")
    of_groups = (per_group(indices, counts, "indices"), per_group(attempts, counts, "attempts"))
    return Rows(tasks, counts, *of_groups)


def encode_parts(blocks: Sequence[RowBlock], frames: Sequence[Sequence[Frame]]) -> pb.Parts:
    """The rows that each frame of each block holds."""
    every = [
        block.places(frame) for block, own in zip(blocks, frames, strict=True) for frame in own
    ]
    return pb.Parts(
        counts=[len(own) for own in frames],
        sizes=[len(places) for places in every],
        rows=chain.from_iterable(every),
    )


def decode_parts(message: pb.Parts, frames: Sequence[bytes], of: Rows) -> list[tuple[Frame, ...]]:
    """The frames of each block. Raises ValueError."""
    counts, sizes = message.counts[:], message.sizes[:]
    if len(counts) != len(of.counts):
        malformed(f"{len(of.counts)} groups, parts of {len(counts)}")
    if min(sizes, default=0) < 0 or len(message.rows) != sum(sizes):
        malformed(f"parts of {sum(sizes)} rows, {len(message.rows)} are named")
    if min(counts, default=0) < 0 or sum(counts) != len(sizes):
        malformed(f"groups with {sum(counts)} parts, {len(sizes)} are there")
    if len(frames) != len(sizes):
        malformed(f"{len(sizes)} parts with {len(frames)} frames")
    named = per_group(message.rows, sizes, "rows")
    every = list(map(Frame, frames, named))
    found = per_group(every, counts, "parts")
    for parts, size in zip(found, of.counts, strict=True):
        for frame in parts:
            places = frame.places
            if places and not 0 <= min(places) <= max(places) < size:
                malformed(f"a frame with columns of rows {places} for a group of {size} rows")
    return found


def _encode_versions(versions: Sequence[Version]) -> pb.VersionList:
    epochs, steps = zip(*versions, strict=True) if versions else ((), ())
    return pb.VersionList(epochs=epochs, steps=steps)


def _decode_versions(message: pb.VersionList, rows: int) -> list[Version]:
    epochs, steps = message.epochs[:], message.steps[:]
    if len(epochs) != rows or len(steps) != rows:
        malformed(f"{rows} rows with {len(epochs)} epochs, {len(steps)} steps of a version")
    pairs = list(zip(epochs, steps, strict=True))
    known = {pair: Version(*pair) for pair in set(pairs)}
    if min(map(min, known), default=0) < 0:
        malformed("a version with a negative part")
    return list(map(known.__getitem__, pairs))


@encoder
def encode_facts(facts: Sequence[Sequence[RowFacts]]) -> pb.Facts | None:
    """The facts of each group's rows; None if no group has any."""
    every = list(chain.from_iterable(facts))
    if not every:
        return None
    columns, finish_reasons = _fact_columns(every)
    given = [bool(of_group) for of_group in facts]
    return pb.Facts(given=given, finish_reasons=finish_reasons, **columns)


def _fact_columns(every: Sequence[RowFacts]) -> tuple[dict[str, Any], Sequence[str]]:
    """The fields of Facts and of Batch for these rows, and their finish reasons, which a batch has not."""
    columns = zip(*every, strict=True) if every else ((),) * 6
    outcomes, num_tokens, oldest, newest, finish_reasons, prompt_tokens = columns
    return {
        "outcomes": map(OUTCOMES.number_of.__getitem__, outcomes),
        "num_tokens": num_tokens,
        "oldest": _encode_versions(oldest),
        "newest": _encode_versions(newest),
        "prompt_tokens": prompt_tokens if any(prompt_tokens) else (),
    }, finish_reasons


@decoder
def decode_facts(message: pb.Facts, counts: Sequence[int]) -> list[tuple[RowFacts, ...]]:
    """The facts of each group's rows; `counts` has the rows of each group. Raises UserError."""
    require(message, "oldest", "newest")
    if len(message.given) != len(counts):
        malformed(f"{len(counts)} groups, facts of {len(message.given)}")
    given = [
        count if has_facts else 0 for count, has_facts in zip(counts, message.given, strict=True)
    ]
    return _facts_of(message, given, message.finish_reasons[:])


def _facts_of(
    message: pb.Facts | pb.Batch, counts: Sequence[int], finish_reasons: Sequence[str]
) -> list[tuple[RowFacts, ...]]:
    """The facts of each group's rows from the fields that both messages have."""
    rows = sum(counts)
    columns = (
        list(map(OUTCOMES.member_of.__getitem__, message.outcomes[:])),
        message.num_tokens[:],
        _decode_versions(message.oldest, rows),
        _decode_versions(message.newest, rows),
        finish_reasons,
        message.prompt_tokens[:] or [0] * rows,
    )
    if any(len(column) != rows for column in columns):
        malformed(f"{rows} rows, facts of {sorted({len(column) for column in columns})}")
    return per_group([_facts(row) for row in zip(*columns, strict=True)], counts, "facts")


@encoder
def encode_batch(batch: Batch) -> pb.Batch:
    """The manifest."""
    groups = batch.groups
    columns, _ = _fact_columns([facts for group in groups for facts in group.facts])
    return pb.Batch(
        batch_id=batch.batch_id,
        run=batch.run,
        step=batch.step,
        rows=encode_rows(groups),
        sizes=[group.group_size for group in groups],
        **columns,
    )


@decoder
def decode_batch(message: pb.Batch) -> Batch:
    """Raises UserError."""
    tasks, counts, indices, attempts = named_rows(message.rows)
    if len(message.sizes) != len(tasks):
        malformed(f"{len(tasks)} groups with {len(message.sizes)} sizes")
    facts = _facts_of(message, counts, [""] * sum(counts))
    groups = [
        RowBlock(
            task=task, indices=of_indices, attempts=of_attempts, group_size=size, facts=of_facts
        )
        for task, of_indices, of_attempts, size, of_facts in zip(
            tasks, indices, attempts, message.sizes, facts, strict=True
        )
    ]
    return Batch(
        batch_id=message.batch_id, run=message.run, step=message.step, groups=tuple(groups)
    )


@encoder
def encode_admit(
    run: str, tasks: Sequence[Task], *, cursor: str, wait_s: float
) -> list[pb.AdmitRequest]:
    """Raises UserError for a task whose ground truth or extra info is not JSON."""
    packed = map(TASK.encode, tasks)
    messages = [pb.AdmitRequest(tasks=page) for page in pages(trajectory_pb2.Task.ByteSize, packed)]
    header = pb.AdmitHeader(run=run, cursor=cursor, wait_s=wait_s, num_tasks=len(tasks))
    messages[0].header.CopyFrom(header)
    return messages


@decoder
def decode_admit(messages: Sequence[pb.AdmitRequest]) -> tuple[pb.AdmitHeader, tuple[Task, ...]]:
    """The header and the tasks. Raises UserError."""
    header: pb.AdmitHeader = _header(messages)
    tasks = tuple(
        [
            TASK.decode(task).came_as(task.SerializeToString())
            for message in messages
            for task in message.tasks
        ]
    )
    if len(tasks) != header.num_tasks:
        malformed(f"{header.num_tasks} tasks were announced, {len(tasks)} came")
    return header, tasks


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
def encode_write(run: str, stage: str, blocks: Sequence[RowBlock]) -> list[Bulk[pb.WriteRequest]]:
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
        for page in pages(lambda block: len(block.frame.value), blocks)
    ]
    header = pb.WriteHeader(run=run, stage=stage, num_groups=len(blocks))
    messages[0].message.header.CopyFrom(header)
    return messages


@decoder
def decode_write(
    messages: Sequence[Bulk[pb.WriteRequest]],
) -> tuple[pb.WriteHeader, tuple[RowBlock, ...]]:
    """The header and the blocks, also of an append, whose blocks have starts. Raises UserError.

    The queue checks the frames; they are copies, which keep no message in memory.
    """
    header: pb.WriteHeader = _header([bulk.message for bulk in messages])
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
    return header, tuple(written)


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
