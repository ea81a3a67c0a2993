"""Rows of several groups side by side, a list for each fact instead of a message for each row or group."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import chain, islice
from typing import NamedTuple, TypeVar

from meshrl.contract.codec.control import decoder, encoder, malformed, require
from meshrl.contract.codec.types import OUTCOMES
from meshrl.contract.frames import Frame
from meshrl.contract.types import Batch, RowBlock, RowFacts, Version
from meshrl.v1 import queue_pb2 as pb

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
    # Lists, because a protobuf container makes its numbers anew each time that somebody looks at them.
    tasks, counts = message.tasks[:], message.counts[:]
    indices, attempts = message.indices[:], message.attempts[:]
    if len(tasks) != len(counts) or not all(tasks):
        malformed(f"{len(counts)} groups with {len(tasks)} task ids, or an empty one")
    if min(chain(counts, indices, attempts), default=0) < 0:
        malformed("a negative count, index or attempt")
    of_groups = (per_group(indices, counts, "indices"), per_group(attempts, counts, "attempts"))
    return Rows(tasks, counts, *of_groups)


def encode_parts(blocks: Sequence[RowBlock], frames: Sequence[Sequence[Frame]]) -> pb.Parts:
    """Of which rows the `frames` of each block are."""
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
    """Of each group; None where none has any."""
    every = list(chain.from_iterable(facts))
    if not every:
        return None
    outcomes, num_tokens, oldest, newest, finish_reasons = zip(*every, strict=True)
    return pb.Facts(
        given=[bool(of_group) for of_group in facts],
        outcomes=map(OUTCOMES.number_of.__getitem__, outcomes),
        num_tokens=num_tokens,
        oldest=_encode_versions(oldest),
        newest=_encode_versions(newest),
        finish_reasons=finish_reasons,
    )


@decoder
def decode_facts(message: pb.Facts, counts: Sequence[int]) -> list[tuple[RowFacts, ...]]:
    """Of each group, which has so many rows. Raises UserError."""
    require(message, "oldest", "newest")
    if len(message.given) != len(counts):
        malformed(f"{len(counts)} groups, facts of {len(message.given)}")
    given = [
        count if has_facts else 0 for count, has_facts in zip(counts, message.given, strict=True)
    ]
    rows = sum(given)
    columns = (
        list(map(OUTCOMES.member_of.__getitem__, message.outcomes[:])),
        message.num_tokens[:],
        _decode_versions(message.oldest, rows),
        _decode_versions(message.newest, rows),
        message.finish_reasons[:],
    )
    if any(len(column) != rows for column in columns):
        malformed(f"{rows} rows, facts of {sorted({len(column) for column in columns})}")
    return per_group([_facts(row) for row in zip(*columns, strict=True)], given, "facts")


@encoder
def encode_batch(batch: Batch) -> pb.Batch:
    """The manifest."""
    groups = batch.groups
    every = list(chain.from_iterable([group.facts for group in groups]))
    outcomes, num_tokens, oldest, newest, _ = zip(*every, strict=True) if every else ((),) * 5
    return pb.Batch(
        batch_id=batch.batch_id,
        run=batch.run,
        step=batch.step,
        rows=encode_rows(groups),
        sizes=[group.group_size for group in groups],
        num_tokens=num_tokens,
        oldest=_encode_versions(oldest),
        newest=_encode_versions(newest),
        outcomes=map(OUTCOMES.number_of.__getitem__, outcomes),
    )


@decoder
def decode_batch(message: pb.Batch) -> Batch:
    """Raises UserError."""
    tasks, counts, indices, attempts = named_rows(message.rows)
    if len(message.sizes) != len(tasks):
        malformed(f"{len(tasks)} groups with {len(message.sizes)} sizes")
    rows = sum(counts)
    columns = (
        list(map(OUTCOMES.member_of.__getitem__, message.outcomes[:])),
        message.num_tokens[:],
        _decode_versions(message.oldest, rows),
        _decode_versions(message.newest, rows),
        [""] * rows,
    )
    if any(len(column) != rows for column in columns):
        malformed(f"{rows} rows, facts of {sorted({len(column) for column in columns})}")
    facts = per_group([_facts(row) for row in zip(*columns, strict=True)], counts, "facts")
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
