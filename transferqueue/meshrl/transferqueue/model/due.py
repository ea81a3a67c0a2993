"""Groups that must be in the next batch, because any later step would be too late for them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from meshrl.transferqueue.model.group import Group


class Sampled(NamedTuple):
    """The groups that are in no batch and are sampled from one version on, while they are fresh enough for a step."""

    first: int
    """The version's step."""
    later: int
    """Groups that fit into the batches after that step's which still come in time for them."""
    groups: int
    complete: int
    """How many of `groups` a take could get."""


def sampled_by(group: Group, step: int) -> bool:
    """True if the group is sampled from `step` or an earlier one on."""
    return first_version(group) <= step


def first_version(group: Group) -> float:
    """The published step when its first row was granted."""
    return math.inf if group.sampled_from is None else group.sampled_from


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
