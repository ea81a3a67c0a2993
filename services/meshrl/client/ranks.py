"""Divides the rows of a batch among a trainer's ranks: a pure function of the manifest, equal on every rank."""

from __future__ import annotations

import heapq
from collections import defaultdict
from dataclasses import dataclass

from meshrl.contract.errors import UserError
from meshrl.contract.types import Batch, BatchRow


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """One rank's part of every batch."""

    rank: int = 0
    world_size: int = 1
    whole_groups: bool = True
    """Keep the rows of a group on one rank, for advantages that compare them. False balances better."""

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise UserError(f"rank {self.rank} is not below world_size {self.world_size}")

    def rows_of(self, batch: Batch) -> tuple[BatchRow, ...]:
        """This rank's rows in the batch's order. Empty if there are fewer groups than ranks.

        Assigns the longest first to the least loaded rank (LPT, Graham 1969: at most 4/3 of the best makespan in
        tokens).
        """
        if self.world_size == 1:
            return batch.rows
        units: dict[object, list[int]] = defaultdict(list)
        for index, row in enumerate(batch.rows):
            units[row.group if self.whole_groups else index].append(index)
        tokens = {key: sum(batch.rows[i].num_tokens for i in unit) for key, unit in units.items()}
        heap = [(0, rank) for rank in range(self.world_size)]
        indices: list[int] = []
        for key in sorted(units, key=lambda key: (-tokens[key], units[key][0])):
            load, rank = heapq.heappop(heap)
            heapq.heappush(heap, (load + tokens[key], rank))
            if rank == self.rank:
                indices += units[key]
        return tuple(batch.rows[index] for index in sorted(indices))
