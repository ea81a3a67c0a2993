"""The plan of a batch: how many groups each shard gives, and in which order they stand.

    batch id on a shard:  <batch id>#<round>/<shard>:<groups>.<shard>:<groups>. ...

The plan is part of the id under which a shard records its groups of a batch, in the same transaction and under the
trainer's epoch. Shard 0 does so before any other, even where it gives none, and records one plan for a batch: so all
who ask for a batch at once follow the same, and whoever asks again finds it, whatever died in between.

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
    """(shard, groups): so many groups of that shard are next. A shard may come several times."""

    @classmethod
    def of(cls, round_: int, runs: Sequence[tuple[int, int]]) -> Self:
        """Neighbouring runs of one shard as one, empty ones left out."""
        kept = groupby((run for run in runs if run[1]), key=lambda run: run[0])
        return cls(round_, tuple((shard, sum(n for _, n in part)) for shard, part in kept))

    @property
    def shares(self) -> dict[int, int]:
        """Groups of shard 0, and of each other that gives any."""
        found = {0: 0}
        for shard, groups in self.runs:
            found[shard] = found.get(shard, 0) + groups
        return found

    def in_order(self, parts: Mapping[int, Sequence[Item]]) -> tuple[Item, ...]:
        """What each shard gave, in the order of the batch."""
        given = {shard: iter(part) for shard, part in parts.items()}
        return tuple(next(given[shard]) for shard, groups in self.runs for _ in range(groups))

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
    """The batch id and the plan in the id of a batch on a shard; no plan in one that no router made."""
    batch_id, _, text = name.rpartition("#")
    try:
        return batch_id, BatchPlan.parse(text)
    except ValueError:
        return name, None
