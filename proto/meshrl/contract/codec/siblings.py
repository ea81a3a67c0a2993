"""Rows of several groups side by side, a list for each fact instead of a message for each row or group."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, islice
from typing import TypeVar

from meshrl.contract.codec.bulk import Frame
from meshrl.contract.codec.checks import decoder, encoder, malformed, require
from meshrl.contract.codec.nouns import OUTCOMES
from meshrl.contract.nouns import BatchGroup, Outcome, Part, RowFacts, Siblings, Version
from meshrl.v1 import queue_pb2 as pb

T = TypeVar("T")


def per_group(values: Sequence[T], groups: Sequence[Siblings], what: str) -> list[tuple[T, ...]]:
    """A list with an entry per row, cut into one tuple per group. Raises ValueError where it does not fit."""
    if len(values) != sum(map(len, groups)):
        malformed(f"{sum(map(len, groups))} rows with {len(values)} {what}")
    entries = iter(values)
    return [tuple(islice(entries, len(group))) for group in groups]


@encoder
def encode_rows(groups: Sequence[Siblings]) -> pb.GroupRows:
    """Any rows."""
    return pb.GroupRows(
        tasks=[group.task for group in groups],
        counts=[len(group.indices) for group in groups],
        indices=chain.from_iterable([group.indices for group in groups]),
        attempts=chain.from_iterable([group.attempts for group in groups]),
    )


@decoder
def decode_rows(message: pb.GroupRows) -> list[Siblings]:
    """Raises UserError for rows that no uid can name."""
    tasks, counts = message.tasks, message.counts
    indices, attempts = message.indices, message.attempts
    if len(tasks) != len(counts) or not all(tasks):
        malformed(f"{len(counts)} groups with {len(tasks)} task ids, or an empty one")
    if min(counts, default=0) < 0 or len(indices) != sum(counts) or len(attempts) != len(indices):
        malformed(
            f"{sum(counts)} rows with {len(indices)} indices, {len(attempts)} attempts"
            f" (or a negative count)"
        )
    if min(indices, default=0) < 0 or min(attempts, default=0) < 0:
        malformed("a negative index or attempt")
    index, attempt = iter(indices), iter(attempts)
    return [
        Siblings(
            task=task,
            indices=tuple(islice(index, count)),
            attempts=tuple(islice(attempt, count)),
        )
        for task, count in zip(tasks, counts, strict=True)
    ]


def encode_parts(parts: Sequence[Sequence[Part]]) -> pb.Parts:
    """Of each group."""
    every = list(chain.from_iterable(parts))
    return pb.Parts(
        counts=[len(of_group) for of_group in parts],
        sizes=[len(part.rows) for part in every],
        rows=chain.from_iterable([part.rows for part in every]),
    )


def decode_parts(
    message: pb.Parts, frames: Iterator[Frame], groups: Sequence[Siblings]
) -> list[tuple[Part, ...]]:
    """Of each group; takes as many frames as it needs. Raises ValueError."""
    if len(message.counts) != len(groups):
        malformed(f"{len(groups)} groups, parts of {len(message.counts)}")
    if min(message.sizes, default=0) < 0 or len(message.rows) != sum(message.sizes):
        malformed(f"parts of {sum(message.sizes)} rows, {len(message.rows)} are named")
    sizes, rows = iter(message.sizes), iter(message.rows)
    found: list[tuple[Part, ...]] = []
    for count, group in zip(message.counts, groups, strict=True):
        parts = [
            Part(rows=tuple(islice(rows, size)), frame=next_frame(frames))
            for size in islice(sizes, max(0, count))
        ]
        if len(parts) != count:
            malformed(f"a group with {count} parts, {len(parts)} are there")
        for part in parts:
            if part.rows and not 0 <= min(part.rows) <= max(part.rows) < len(group):
                malformed(
                    f"a frame with columns of rows {part.rows} for a group of {len(group)} rows"
                )
        found.append(tuple(parts))
    if next(sizes, None) is not None:
        malformed("more parts than groups speak of")
    return found


def next_frame(frames: Iterator[Frame]) -> Frame:
    """Raises ValueError when there is none."""
    frame = next(frames, None)
    if frame is None:
        malformed("fewer frames than groups speak of")
    return frame


def _encode_versions(versions: Sequence[Version]) -> pb.VersionList:
    return pb.VersionList(
        epochs=[version.epoch for version in versions], steps=[version.step for version in versions]
    )


def _decode_versions(message: pb.VersionList, rows: int) -> list[Version]:
    epochs, steps = message.epochs, message.steps
    if len(epochs) != rows or len(steps) != rows:
        malformed(f"{rows} rows with {len(epochs)} epochs, {len(steps)} steps of a version")
    if rows and (min(epochs) < 0 or min(steps) < 0):
        malformed("a version with a negative part")
    known = {pair: Version(*pair) for pair in set(zip(epochs, steps, strict=True))}
    return [known[pair] for pair in zip(epochs, steps, strict=True)]


def _decode_outcomes(numbers: Sequence[int]) -> list[Outcome]:
    known = {number: OUTCOMES.decode(number) for number in set(numbers)}
    return [known[number] for number in numbers]


@encoder
def encode_facts(facts: Sequence[Sequence[RowFacts]]) -> pb.Facts | None:
    """Of each group; None where none has any."""
    every = list(chain.from_iterable(facts))
    if not every:
        return None
    return pb.Facts(
        given=[bool(of_group) for of_group in facts],
        outcomes=[OUTCOMES.encode(fact.outcome) for fact in every],
        num_tokens=[fact.num_tokens for fact in every],
        oldest=_encode_versions([fact.oldest for fact in every]),
        newest=_encode_versions([fact.newest for fact in every]),
        finish_reasons=[fact.finish_reason for fact in every],
    )


@decoder
def decode_facts(message: pb.Facts, groups: Sequence[Siblings]) -> list[tuple[RowFacts, ...]]:
    """Of each group. Raises UserError."""
    require(message, "oldest", "newest")
    if len(message.given) != len(groups):
        malformed(f"{len(groups)} groups, facts of {len(message.given)}")
    rows = sum(len(group) for group, given in zip(groups, message.given, strict=True) if given)
    columns = (
        _decode_outcomes(message.outcomes),
        message.num_tokens,
        _decode_versions(message.oldest, rows),
        _decode_versions(message.newest, rows),
        message.finish_reasons,
    )
    if any(len(column) != rows for column in columns):
        malformed(f"{rows} rows, facts of {sorted({len(column) for column in columns})}")
    facts = map(RowFacts, *columns)
    return [
        tuple(islice(facts, len(group))) if given else ()
        for group, given in zip(groups, message.given, strict=True)
    ]


@encoder
def encode_manifest(batch_id: str, run: str, step: int, groups: Sequence[BatchGroup]) -> pb.Batch:
    """Any manifest."""
    return pb.Batch(
        batch_id=batch_id,
        run=run,
        step=step,
        rows=encode_rows(groups),
        sizes=[group.size for group in groups],
        num_tokens=chain.from_iterable([group.num_tokens for group in groups]),
        oldest=_encode_versions([version for group in groups for version in group.oldest]),
        newest=_encode_versions([version for group in groups for version in group.newest]),
        outcomes=[OUTCOMES.encode(outcome) for group in groups for outcome in group.outcomes],
    )


@decoder
def decode_manifest(message: pb.Batch) -> tuple[BatchGroup, ...]:
    """Its groups. Raises UserError."""
    groups = decode_rows(message.rows)
    if len(message.sizes) != len(groups):
        malformed(f"{len(groups)} groups with {len(message.sizes)} sizes")
    rows = sum(map(len, groups))
    columns = zip(
        groups,
        message.sizes,
        per_group(message.num_tokens, groups, "lengths"),
        per_group(_decode_versions(message.oldest, rows), groups, "oldest versions"),
        per_group(_decode_versions(message.newest, rows), groups, "newest versions"),
        per_group(_decode_outcomes(message.outcomes), groups, "outcomes"),
        strict=True,
    )
    return tuple(
        BatchGroup(
            task=group.task,
            indices=group.indices,
            attempts=group.attempts,
            size=size,
            num_tokens=num_tokens,
            oldest=oldest,
            newest=newest,
            outcomes=outcomes,
        )
        for group, size, num_tokens, oldest, newest, outcomes in columns
    )
