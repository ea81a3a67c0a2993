"""Renews held leases over several shards: every shard is asked about all rows; a row that all shards deny is lost.

A shard knows best which rows it has, so nothing here follows tasks about. A row of a shard that is away is not
lost: the shard has not said so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from meshrl.contract.held_rows import Held, HeldLeases
from meshrl.contract.types import Uid


class ShardHeldLeases(HeldLeases):
    """What one shard is asked to renew: all held rows of the runs that it has."""

    def __init__(
        self, every: HeldLeases, has: Callable[[str], bool], on_lost: Callable[[], None]
    ) -> None:
        """`has` says whether a run is on the shard; `on_lost` is called when the shard denies rows."""
        super().__init__(every.stage, every.worker, self._lose)
        self._every = every
        self._has = has
        self._on_lost = on_lost
        self._gone: dict[Uid, int] = {}

    @property
    def period_s(self) -> float:
        """See HeldLeases."""
        return self._every.period_s

    def by_run(self) -> Mapping[str, Held]:
        """See HeldLeases."""
        return {run: rows for run, rows in self._every.by_run().items() if self._has(run)}

    def _lose(self, rows: Held) -> None:
        gone = {**self._gone, **rows}
        self._gone = {uid: gone[uid] for uid in self._every.still(gone)}
        self._on_lost()

    def lacks(self, uid: Uid, token: int) -> bool:
        """Whether the shard denies that we hold this row."""
        return self._gone.get(uid) == token or not self._has(uid.run)

    @property
    def gone(self) -> Held:
        """Rows that the shard denies, of those that are still held."""
        return self._gone


class ShardedHeldLeases:
    """The held leases of one worker, and a part for each shard."""

    def __init__(self, held_leases: HeldLeases) -> None:
        self._held_leases = held_leases
        self._parts: list[ShardHeldLeases] = []
        held_leases.began = self._began

    def part(self, has: Callable[[str], bool]) -> ShardHeldLeases:
        """The part for one more shard."""
        part = ShardHeldLeases(self._held_leases, has, self._agree)
        self._parts.append(part)
        return part

    def _began(self) -> None:
        for part in self._parts:
            part.began()

    def _agree(self) -> None:
        lost = {
            uid: token
            for uid, token in self._parts[0].gone.items()
            if all(part.lacks(uid, token) for part in self._parts)
        }
        if lost:
            self._held_leases.lost(lost)
