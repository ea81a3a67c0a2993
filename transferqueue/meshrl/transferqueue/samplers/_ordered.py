"""The common part of samplers that order groups by a key."""

from __future__ import annotations

from meshrl.transferqueue.model.ready import Key, OrderedNumbers
from meshrl.transferqueue.sampling import CompleteGroup


class OrderedSampler:
    """Lowest `key` first; ties by admission."""

    def __init__(self) -> None:
        self._groups = OrderedNumbers()

    def key(self, group: CompleteGroup) -> Key:
        """The key of a group; the lowest is taken first."""
        return (group.number,)

    def add(self, group: CompleteGroup) -> None:
        """A group became complete."""
        self._groups.add(group.number, self.key(group))

    def discard(self, number: int) -> None:
        """A group was taken or left."""
        self._groups.discard(number)

    def first(self, count: int) -> list[int]:
        """The next `count` groups; they stay."""
        return self._groups.first(count)

    def __len__(self) -> int:
        return len(self._groups)
