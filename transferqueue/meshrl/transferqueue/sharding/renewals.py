"""Renewals over several shards: each is asked about all rows of a held_leases, and what all have lost is lost.

Where a row is, its shard knows best: nothing here follows tasks about. What a shard has that is away is not lost: it
has not said so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from meshrl.contract.held_leases import Held, HeldLeases
from meshrl.contract.types import Uid


class Part(HeldLeases):
    """What one shard is asked to renew: everything, of the runs that it has."""

    def __init__(
        self, whole: HeldLeases, has: Callable[[str], bool], told: Callable[[], None]
    ) -> None:
        """`has` knows the shard's runs; `told` is called when the shard has said that rows are lost."""
        super().__init__(whole.stage, whole.worker, self._lose)
        self._whole = whole
        self._has = has
        self._told = told
        self._gone: dict[Uid, int] = {}

    @property
    def period_s(self) -> float:
        """See HeldLeases."""
        return self._whole.period_s

    def by_run(self) -> Mapping[str, Held]:
        """See HeldLeases."""
        return {run: rows for run, rows in self._whole.by_run().items() if self._has(run)}

    def _lose(self, rows: Held) -> None:
        gone = {**self._gone, **rows}
        self._gone = {uid: gone[uid] for uid in self._whole.still(gone)}
        self._told()

    def lacks(self, uid: Uid, token: int) -> bool:
        """The shard does not hold this row for us."""
        return self._gone.get(uid) == token or not self._has(uid.run)

    @property
    def gone(self) -> Held:
        """What the shard has said to be lost, of what is still held."""
        return self._gone


class ShardedHeldLeases:
    """One held_leases and its parts."""

    def __init__(self, held_leases: HeldLeases) -> None:
        self._held_leases = held_leases
        self._parts: list[Part] = []
        held_leases.began = self._began

    def part(self, has: Callable[[str], bool]) -> Part:
        """For one shard more."""
        part = Part(self._held_leases, has, self._agree)
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
