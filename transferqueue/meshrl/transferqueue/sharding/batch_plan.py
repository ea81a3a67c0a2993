"""The plan of a batch: how many groups each shard gives, and in which order they stand.

    batch id on a shard:  <batch id>#<round>/<shard>:<groups>.<shard>:<groups>. ...

The plan is part of the id under which a shard records its groups of a batch, in the same transaction and under the
trainer's epoch. Shard 0 records it before any other shard, even where it gives no group, and records one plan for a
batch. So all callers that ask for a batch at the same time follow the same plan, and a caller that asks again finds
it, whatever died in between.

A round is a number that grows from batch to batch, the same on all shards. A group keeps the round in which it was
first taken in its position, so that shards agree on the order in which groups come again after a rewind.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Self, TypeVar

ROUND_BITS = 24
"""A position is `round << ROUND_BITS` and a number."""

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """One batch, spread over shards."""

    round: int
    runs: tuple[tuple[int, int], ...]
    """(shard, groups): that many groups of that shard are next. A shard may stand here several times."""

    @classmethod
    def of(cls, round_: int, runs: Sequence[tuple[int, int]]) -> Self:
        """Joins neighbouring runs of one shard and leaves out empty ones."""
        joined = groupby((run for run in runs if run[1]), key=lambda run: run[0])
        return cls(round_, tuple((shard, sum(n for _, n in part)) for shard, part in joined))

    @property
    def shares(self) -> dict[int, int]:
        """Groups by shard: of shard 0, and of every other shard that gives any."""
        shares = {0: 0}
        for shard, groups in self.runs:
            shares[shard] = shares.get(shard, 0) + groups
        return shares

    def in_order(self, parts: Mapping[int, Sequence[Item]]) -> tuple[Item, ...]:
        """What each shard gave, in the order of the batch."""
        parts_left = {shard: iter(part) for shard, part in parts.items()}
        return tuple(next(parts_left[shard]) for shard, groups in self.runs for _ in range(groups))

    def name(self, batch_id: str) -> str:
        """The id of the batch on a shard."""
        return f"{batch_id}#{self}"

    def __str__(self) -> str:
        return f"{self.round}/" + ".".join(f"{shard}:{groups}" for shard, groups in self.runs)

    @classmethod
    def parse(cls, text: str) -> Self:
        """The inverse of `str`. Raises ValueError."""
        round_, _, runs = text.partition("/")
        pairs = [run.split(":") for run in runs.split(".")]
        return cls(int(round_), tuple((int(shard), int(groups)) for shard, groups in pairs))


def parse_batch_name(name: str) -> tuple[str, BatchPlan | None]:
    """The batch id and the plan in the id of a batch on a shard; no plan where no router made the id."""
    batch_id, _, text = name.rpartition("#")
    try:
        return batch_id, BatchPlan.parse(text)
    except ValueError:
        return name, None
