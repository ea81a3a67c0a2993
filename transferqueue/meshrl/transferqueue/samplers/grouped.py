"""Groups of one data source together, beginning with the source that has the oldest group."""

from __future__ import annotations

from meshrl.transferqueue.sampling import CompleteGroup, OrderedNumbers


class Sampler:
    """A batch mixes sources only if one source has too few groups to fill it."""

    def __init__(self) -> None:
        self._by_source: dict[str, OrderedNumbers] = {}
        self._source_of: dict[int, str] = {}

    def add(self, group: CompleteGroup) -> None:
        """Add a complete group."""
        self._source_of[group.number] = group.data_source
        self._by_source.setdefault(group.data_source, OrderedNumbers()).put(
            group.number, (group.number,)
        )

    def discard(self, number: int) -> None:
        """Discard a group that was taken or left."""
        source = self._source_of.pop(number, None)
        if source is not None:
            self._by_source[source].discard(number)
            if not len(self._by_source[source]):
                del self._by_source[source]

    def first(self, count: int) -> list[int]:
        """The next `count` groups; they stay. O(count log n + sources)."""
        chosen: list[int] = []
        oldest_first = sorted(self._by_source.values(), key=lambda numbers: numbers.first(1))
        for numbers in oldest_first:
            chosen += numbers.first(count - len(chosen))
            if len(chosen) == count:
                break
        return chosen

    def __len__(self) -> int:
        return len(self._source_of)
