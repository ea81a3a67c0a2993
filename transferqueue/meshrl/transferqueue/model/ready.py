"""Rows that a stage can lease and groups that can be taken now, kept in order as they come and go: no scans."""

from __future__ import annotations

import heapq
from typing import TypeAlias

from meshrl.transferqueue.model.group import Group, lowest
from meshrl.transferqueue.sampling import CompleteGroup, Sampler

Key: TypeAlias = tuple[float, ...]


class OrderedNumbers:
    """A set of numbers with a key each; lowest key first, ties by number."""

    def __init__(self) -> None:
        self._heap: list[tuple[Key, int]] = []
        self._keys: dict[int, Key] = {}

    def add(self, number: int, key: Key) -> None:
        """Add `number`, or move it to `key`. O(log n)."""
        self._keys[number] = key
        heapq.heappush(self._heap, (key, number))

    def discard(self, number: int) -> None:
        """Remove `number` if it is in the set. O(1): its heap entry is dropped when it reaches the top."""
        self._keys.pop(number, None)

    def first(self, count: int) -> list[int]:
        """The `count` first numbers (fewer if there are fewer); they stay. O(count log n)."""
        entries: list[tuple[Key, int]] = []
        while self._heap and len(entries) < count:
            entry = heapq.heappop(self._heap)
            # A number that left and came back under its old key has two equal entries, one after the other.
            if self._keys.get(entry[1]) == entry[0] and (not entries or entries[-1] != entry):
                entries.append(entry)
        for entry in entries:
            heapq.heappush(self._heap, entry)
        return [number for _, number in entries]

    def __len__(self) -> int:
        return len(self._keys)


CLAIM_S = 2.0
"""How long the rest of a group is kept for the worker that has its siblings, if others have other rows to lease."""


class ReadyRows:
    """The rows of one stage: highest task priority first, then oldest group, then index, so siblings come together.

    A worker that got a part of a group has the prompt in its cache: for CLAIM_S the other workers skip the
    rest, unless there is nothing else for them.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, int]] = []
        """(-priority, group number): one entry per group of `_queued`; one without rows is dropped at the top."""
        self._queued: set[int] = set()
        self._rows: dict[int, tuple[Group, int]] = {}
        """By group number: the group and the mask of its rows that are ready."""
        self._count = 0
        self._claims: dict[int, tuple[str, float]] = {}
        """By group number: the worker that has siblings of its rows, and until when the rest is kept for it."""

    def __len__(self) -> int:
        return self._count

    def set(self, group: Group, mask: int) -> bool:
        """Exactly the rows in `mask` of this group are ready; returns True if some were not before. O(log groups)."""
        number = group.number
        entry = self._rows.get(number)
        old = entry[1] if entry else 0
        if mask == old:
            return False
        self._count += mask.bit_count() - old.bit_count()
        came = bool(mask & ~old)
        if came or not mask:
            # Rows that came back may go to any worker.
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
        """Remove and return at most `limit` rows in order, for `worker`. O(groups visited x log groups)."""
        popped: list[tuple[Group, int]] = []
        others: list[tuple[int, int]] = []
        while limit > 0 and (head := self._head()) is not None:
            claim = self._claims.get(head[1])
            if claim is not None and claim[0] != worker and now < claim[1]:
                others.append(heapq.heappop(self._heap))
            else:
                limit -= self._take(head[1], limit, worker, now, popped)
        for entry in others:
            heapq.heappush(self._heap, entry)
        for _, number in others:
            if limit > 0:
                limit -= self._take(number, limit, worker, now, popped)
        return popped

    def _head(self) -> tuple[int, int] | None:
        """The first entry whose group has rows."""
        while self._heap:
            if self._heap[0][1] in self._rows:
                return self._heap[0]
            self._queued.discard(heapq.heappop(self._heap)[1])
        return None

    def _take(
        self, number: int, limit: int, worker: str, now: float, popped: list[tuple[Group, int]]
    ) -> int:
        """Move up to `limit` rows of one group to `popped`; returns how many."""
        group, mask = self._rows[number]
        taken = lowest(mask, limit)
        popped.append((group, taken))
        self.set(group, mask & ~taken)
        if mask & ~taken and self._claims.get(number, ("", 0.0))[0] != worker:
            self._claims[number] = (worker, now + CLAIM_S)
        return taken.bit_count()


class CompleteGroups:
    """Groups that were taken before come first, in their old order; then those of the sampler, in its order."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self._taken_before = OrderedNumbers()
        """By position."""
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, group: Group) -> None:
        """The group, which is in no batch, became complete."""
        group.complete = True
        self._count += 1
        if group.position >= 0:
            self._taken_before.add(group.number, (group.position,))
            return
        facts = group.facts_of(group.finished)
        _, num_tokens, oldest, newest, _ = zip(*facts, strict=True)
        self._sampler.add(
            CompleteGroup(
                number=group.number,
                task_id=group.task_id,
                priority=group.metadata.priority,
                data_source=group.metadata.data_source,
                difficulty=group.metadata.difficulty,
                num_tokens=num_tokens,
                oldest=min(oldest),
                newest=max(newest),
            )
        )

    def discard(self, group: Group) -> None:
        """The group, if it is here, was taken, left or is not complete any more."""
        if group.complete:
            group.complete = False
            self._count -= 1
            self._sampler.discard(group.number)
            self._taken_before.discard(group.number)

    def first(self, count: int) -> list[int]:
        """The numbers of the next `count` groups in order (fewer if there are fewer); they stay."""
        numbers = self._taken_before.first(count)
        if len(numbers) < count:
            numbers += self._sampler.first(count - len(numbers))
        return numbers
