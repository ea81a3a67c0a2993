"""A set of numbers in the order of their keys: a heap whose outdated entries are dropped when they reach the top."""

from __future__ import annotations

import heapq
from typing import TypeAlias

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
