"""The rows that one stage could lease now, kept in order as they come and go: no scan, ever."""

from __future__ import annotations

import heapq

from meshrl.transferqueue.rows import Group, Row


class ReadyRows:
    """Highest task priority first, then oldest group, then index: siblings come together."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int]] = []
        """(-priority, group number); one entry per group of `_rows`, and dead ones that are dropped when met."""
        self._queued: set[int] = set()
        self._rows: dict[int, dict[int, Row]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, row: Row) -> None:
        """The row can be leased. O(log groups)."""
        group = row.group
        siblings = self._rows.setdefault(group.number, {})
        self._count += row.index not in siblings
        siblings[row.index] = row
        if group.number not in self._queued:
            self._queued.add(group.number)
            heapq.heappush(self._heap, (-group.priority, group.number))

    def discard(self, row: Row) -> None:
        """The row can be leased no more. O(1)."""
        siblings = self._rows.get(row.group.number)
        if siblings is not None and siblings.get(row.index) is row:
            del siblings[row.index]
            self._count -= 1
            if not siblings:
                del self._rows[row.group.number]

    def pop(self, limit: int) -> list[Row]:
        """At most `limit` rows in order; they are here no more. O(limit + groups met x log groups)."""
        found: list[Row] = []
        while self._heap and len(found) < limit:
            number = self._heap[0][1]
            siblings = self._rows.get(number)
            if not siblings:
                heapq.heappop(self._heap)
                self._queued.discard(number)
                continue
            for index in sorted(siblings)[: limit - len(found)]:
                found.append(siblings[index])
                self.discard(siblings[index])
        return found

    def groups(self) -> list[Group]:
        """Groups with a row here, in no order; for people who ask why something waits."""
        return [next(iter(siblings.values())).group for siblings in self._rows.values()]
