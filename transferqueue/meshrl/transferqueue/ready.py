"""The rows that one stage could lease now, kept in order as they come and go: no scan, ever."""

from __future__ import annotations

import heapq

from meshrl.transferqueue.group import Group, lowest


class ReadyRows:
    """Highest task priority first, then oldest group, then index: siblings come together."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int]] = []
        """(-priority, group number); one entry per group of `_queued`, and dead ones that are dropped when met."""
        self._queued: set[int] = set()
        self._rows: dict[int, tuple[Group, int]] = {}
        """By group number: the group and the mask of its rows that are here."""
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def set(self, group: Group, mask: int) -> bool:
        """Exactly the rows of `mask` are here of this group; True when some came that were not. O(log groups)."""
        number = group.number
        _, old = self._rows.get(number, (group, 0))
        self._count += mask.bit_count() - old.bit_count()
        if not mask:
            self._rows.pop(number, None)
            return False
        self._rows[number] = (group, mask)
        if number not in self._queued:
            self._queued.add(number)
            heapq.heappush(self._heap, (-group.traits.priority, number))
        return bool(mask & ~old)

    def pop(self, limit: int) -> list[tuple[Group, int]]:
        """At most `limit` rows in order; they are here no more. O(groups met x log groups)."""
        found: list[tuple[Group, int]] = []
        while self._heap and limit > 0:
            number = self._heap[0][1]
            entry = self._rows.get(number)
            if entry is None:
                heapq.heappop(self._heap)
                self._queued.discard(number)
                continue
            group, mask = entry
            taken = lowest(mask, limit)
            limit -= taken.bit_count()
            found.append((group, taken))
            self.set(group, mask & ~taken)
        return found
