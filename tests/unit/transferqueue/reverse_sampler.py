"""A sampler as a user would write one: last admitted, first taken."""

from __future__ import annotations

from collections.abc import Sequence

from meshrl.transferqueue.sampling import CompleteGroup


class Sampler:
    def __init__(self) -> None:
        self._numbers: set[int] = set()

    def add(self, group: CompleteGroup) -> None:
        self._numbers.add(group.number)

    def discard(self, number: int) -> None:
        self._numbers.discard(number)

    def first(self, count: int) -> Sequence[int]:
        return sorted(self._numbers, reverse=True)[:count]

    def __len__(self) -> int:
        return len(self._numbers)
