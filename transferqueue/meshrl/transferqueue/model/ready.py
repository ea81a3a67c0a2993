"""The rows that one stage could lease now, kept in order as they come and go: no scan, ever."""

from __future__ import annotations

import heapq

from meshrl.transferqueue.model.group import Group
from meshrl.transferqueue.model.masks import lowest

CLAIM_S = 2.0
"""How long the rest of a group waits for the worker that has its siblings, while others have rows without it."""


class ReadyRows:
    """Highest task priority first, then oldest group, then index: siblings come together.

    A worker that was handed a part of a group has the prompt in its cache: others pass the rest over for CLAIM_S,
    unless there is nothing else for them.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, int]] = []
        """(-priority, group number); one entry per group of `_queued`, and dead ones that are dropped when met."""
        self._queued: set[int] = set()
        self._rows: dict[int, tuple[Group, int]] = {}
        """By group number: the group and the mask of its rows that are here."""
        self._count = 0
        self._claims: dict[int, tuple[str, float]] = {}
        """By group number: who has siblings of its rows, and until when that counts."""

    def __len__(self) -> int:
        return self._count

    def set(self, group: Group, mask: int) -> bool:
        """Exactly the rows of `mask` are here of this group; True when some came that were not. O(log groups)."""
        number = group.number
        kept = self._rows.get(number)
        old = kept[1] if kept else 0
        if mask == old:
            return False
        self._count += mask.bit_count() - old.bit_count()
        came = bool(mask & ~old)
        if came or not mask:
            # Rows that came back need not go to where they came from.
            self._claims.pop(number, None)
        if not mask:
            self._rows.pop(number, None)
            return False
        self._rows[number] = (group, mask)
        if number not in self._queued:
            self._queued.add(number)
            heapq.heappush(self._heap, (-group.metadata.priority, number))
        return came

    def pop(self, limit: int, worker: str = "", now: float = 0.0) -> list[tuple[Group, int]]:
        """At most `limit` rows in order, for `worker`; they are here no more. O(groups met x log groups)."""
        found: list[tuple[Group, int]] = []
        others: list[tuple[int, int]] = []
        while limit > 0 and (head := self._head()) is not None:
            claim = self._claims.get(head[1])
            if claim is not None and claim[0] != worker and now < claim[1]:
                others.append(heapq.heappop(self._heap))
            else:
                limit -= self._take(head[1], limit, worker, now, found)
        for entry in others:
            heapq.heappush(self._heap, entry)
        for _, number in others:
            if limit > 0:
                limit -= self._take(number, limit, worker, now, found)
        return found

    def _head(self) -> tuple[int, int] | None:
        """The first entry whose group has rows."""
        while self._heap:
            if self._heap[0][1] in self._rows:
                return self._heap[0]
            self._queued.discard(heapq.heappop(self._heap)[1])
        return None

    def _take(
        self, number: int, limit: int, worker: str, now: float, found: list[tuple[Group, int]]
    ) -> int:
        """Move up to `limit` rows of one group to `found`; returns how many."""
        group, mask = self._rows[number]
        taken = lowest(mask, limit)
        found.append((group, taken))
        self.set(group, mask & ~taken)
        if mask & ~taken and self._claims.get(number, ("", 0.0))[0] != worker:
            self._claims[number] = (worker, now + CLAIM_S)
        return taken.bit_count()
