"""Which groups the batch of a step must have, since every later batch would get them too late."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple


class Sampled(NamedTuple):
    """The groups that are in no batch and are sampled from one version on, while they are fresh enough for a step."""

    first: int
    """The version's step."""
    later: int
    """Groups that fit into the batches after that step's which still come in time for them."""
    groups: int
    complete: int
    """How many of `groups` a take could get."""


def together(parts: Iterable[Sequence[Sampled]]) -> list[Sampled]:
    """The groups of several shards as if they were in one queue."""
    total: dict[int, Sampled] = {}
    for part in parts:
        for one in part:
            groups, complete = total[one.first][2:] if one.first in total else (0, 0)
            total[one.first] = one._replace(
                groups=groups + one.groups, complete=complete + one.complete
            )
    return [total[first] for first in sorted(total)]


def due(sampled: Sequence[Sampled], count: int) -> Iterator[tuple[int, int, int]]:
    """How many of the groups that are sampled from `first` or earlier on must be in a batch of `count` groups.

    `sampled` is in the order of `first`. Yields (first, groups, how many of those are not complete).
    """
    groups = complete = 0
    for one in sampled:
        groups += one.groups
        complete += one.complete
        if (wanted := min(groups - one.later, count)) > 0:
            yield one.first, wanted, max(0, wanted - complete)


def most_lacking(sampled: Sequence[Sampled], count: int) -> tuple[int, int]:
    """The `first` of `due` for which the most groups are not complete, and how many; (-1, 0): all are."""
    lacking = [(first, groups) for first, _, groups in due(sampled, count) if groups]
    return max(lacking, key=lambda each: each[1], default=(-1, 0))


def earliest(sampled: Sequence[Sampled], count: int, by: int) -> list[tuple[int, int]]:
    """(first, groups) as of `due`, where complete groups that are sampled from step `by` or earlier on come first."""
    complete = 0
    return [
        (one.first, min(complete := complete + one.complete, count))
        for one in sampled
        if one.first <= by
    ]


def unfinished(sampled: Sequence[Sampled], by: int) -> int:
    """The groups that are sampled from step `by` or earlier on and are not complete."""
    return sum(one.groups - one.complete for one in sampled if one.first <= by)
