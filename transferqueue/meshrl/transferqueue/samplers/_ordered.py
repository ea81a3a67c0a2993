"""The common part of samplers that order groups by a key: a heap whose dead entries are dropped when met."""

from __future__ import annotations

import heapq
from typing import TypeAlias

from meshrl.transferqueue.sampling import CompleteGroup

Key: TypeAlias = tuple[int, ...]


class OrderedSampler:
    """Lowest `key` first; ties by admission."""

    def __init__(self) -> None:
        self._heap: list[tuple[Key, int]] = []
        self._keys: dict[int, Key] = {}

    def key(self, group: CompleteGroup) -> Key:
        """What to order by; the lowest is taken first."""
        return (group.number,)

    def add(self, group: CompleteGroup) -> None:
        """O(log n)."""
        key = self.key(group)
        self._keys[group.number] = key
        heapq.heappush(self._heap, (key, group.number))

    def discard(self, number: int) -> None:
        """O(1): the heap's entry is dropped when it comes up."""
        self._keys.pop(number, None)

    def first(self, count: int) -> list[int]:
        """O(count log n)."""
        found: list[tuple[Key, int]] = []
        while self._heap and len(found) < count:
            entry = heapq.heappop(self._heap)
            if self._keys.get(entry[1]) == entry[0] and (not found or found[-1] != entry):
                found.append(entry)
        for entry in found:
            heapq.heappush(self._heap, entry)
        return [number for _, number in found]

    def __len__(self) -> int:
        return len(self._keys)
