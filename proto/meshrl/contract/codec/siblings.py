"""Rows of one group side by side: their names, facts and versions, and the groups of a manifest."""

from __future__ import annotations

from collections.abc import Sequence

from meshrl.contract.codec.checks import decoder, encoder, malformed, require
from meshrl.contract.codec.nouns import OUTCOMES
from meshrl.contract.nouns import BatchGroup, RowFacts, Siblings, Version
from meshrl.v1 import queue_pb2 as pb


@encoder
def encode_siblings(rows: Siblings) -> pb.Siblings:
    """Any rows."""
    return pb.Siblings(task=rows.task, indices=rows.indices, attempts=rows.attempts)


@decoder
def decode_siblings(message: pb.Siblings) -> Siblings:
    """Raises UserError for rows that no uid can name."""
    indices, attempts = tuple(message.indices), tuple(message.attempts)
    if not message.task or len(indices) != len(attempts):
        malformed(f"task {message.task!r} with {len(indices)} indices, {len(attempts)} attempts")
    if min(indices, default=0) < 0 or min(attempts, default=0) < 0:
        malformed(f"task {message.task!r}: negative index or attempt")
    return Siblings(task=message.task, indices=indices, attempts=attempts)


def _encode_versions(versions: Sequence[Version]) -> pb.VersionList:
    return pb.VersionList(
        epochs=[version.epoch for version in versions], steps=[version.step for version in versions]
    )


def _decode_versions(message: pb.VersionList, rows: int) -> tuple[Version, ...]:
    epochs, steps = message.epochs, message.steps
    if len(epochs) != rows or len(steps) != rows:
        malformed(f"{rows} rows with {len(epochs)} epochs, {len(steps)} steps of a version")
    if rows and (min(epochs) < 0 or min(steps) < 0):
        malformed("a version with a negative part")
    if len(set(epochs)) == len(set(steps)) == 1:
        return (Version(epochs[0], steps[0]),) * rows
    return tuple(map(Version, epochs, steps))


@encoder
def encode_facts(facts: Sequence[RowFacts]) -> pb.GroupFacts:
    """Of each row."""
    return pb.GroupFacts(
        outcomes=[OUTCOMES.encode(fact.outcome) for fact in facts],
        num_tokens=[fact.num_tokens for fact in facts],
        oldest=_encode_versions([fact.oldest for fact in facts]),
        newest=_encode_versions([fact.newest for fact in facts]),
        finish_reasons=[fact.finish_reason for fact in facts],
    )


@decoder
def decode_facts(message: pb.GroupFacts) -> tuple[RowFacts, ...]:
    """Raises UserError."""
    require(message, "oldest", "newest")
    rows = len(message.outcomes)
    columns = zip(
        map(OUTCOMES.decode, message.outcomes),
        message.num_tokens,
        _decode_versions(message.oldest, rows),
        _decode_versions(message.newest, rows),
        message.finish_reasons,
        strict=True,
    )
    return tuple(
        RowFacts(
            outcome=outcome, num_tokens=tokens, oldest=oldest, newest=newest, finish_reason=reason
        )
        for outcome, tokens, oldest, newest, reason in columns
    )


@encoder
def encode_batch_group(group: BatchGroup) -> pb.BatchGroup:
    """Any group of a manifest."""
    return pb.BatchGroup(
        rows=encode_siblings(group),
        size=group.size,
        num_tokens=group.num_tokens,
        oldest=_encode_versions(group.oldest),
        newest=_encode_versions(group.newest),
        outcomes=[OUTCOMES.encode(outcome) for outcome in group.outcomes],
    )


@decoder
def decode_batch_group(message: pb.BatchGroup) -> BatchGroup:
    """Raises UserError."""
    require(message, "rows", "oldest", "newest")
    rows = decode_siblings(message.rows)
    count = len(rows)
    if len(message.num_tokens) != count or len(message.outcomes) != count:
        malformed(
            f"{count} rows with {len(message.num_tokens)} lengths, {len(message.outcomes)} outcomes"
        )
    return BatchGroup(
        task=rows.task,
        indices=rows.indices,
        attempts=rows.attempts,
        size=message.size,
        num_tokens=tuple(message.num_tokens),
        oldest=_decode_versions(message.oldest, count),
        newest=_decode_versions(message.newest, count),
        outcomes=tuple(map(OUTCOMES.decode, message.outcomes)),
    )
