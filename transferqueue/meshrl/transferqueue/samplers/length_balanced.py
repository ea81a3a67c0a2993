"""Batches of about equal tokens: sort twice as many of the oldest groups by length, and take every second one."""

from __future__ import annotations

from meshrl.transferqueue.sampling import CompleteGroup, OrderedNumbers


class Sampler:
    """Pairs groups of similar length and takes the older of each pair, so a batch gets half of the window's tokens.

    The oldest group is the older one of its pair and always taken, so no group waits for ever.
    """

    def __init__(self) -> None:
        self._numbers = OrderedNumbers()
        self._tokens: dict[int, int] = {}

    def add(self, group: CompleteGroup) -> None:
        """Add a complete group."""
        self._numbers.put(group.number, (group.number,))
        self._tokens[group.number] = sum(group.num_tokens)

    def discard(self, number: int) -> None:
        """Discard a group that was taken or left."""
        self._numbers.discard(number)
        self._tokens.pop(number, None)

    def first(self, count: int) -> list[int]:
        """The next `count` groups; they stay. O(count log n)."""
        window = self._numbers.first(2 * count)
        extra = len(window) - count
        if extra <= 0:
            return window
        # With fewer than twice as many groups, the oldest are taken without a partner.
        alone, paired = window[: count - extra], window[count - extra :]
        by_length = sorted(paired, key=lambda number: (self._tokens[number], number))
        chosen = [min(pair) for pair in zip(by_length[::2], by_length[1::2], strict=True)]
        return sorted(alone + chosen)

    def __len__(self) -> int:
        return len(self._numbers)
