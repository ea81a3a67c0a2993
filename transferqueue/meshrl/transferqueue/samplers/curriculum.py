"""Easiest first: by the number in the task's `extra_info["difficulty"]`, 0 if there is none."""

from __future__ import annotations

from meshrl.transferqueue.sampling import CompleteGroup, Key, OrderedSampler


class Sampler(OrderedSampler):
    """Ties by admission. It chooses among the admitted groups, which follow the order of the data."""

    def key(self, group: CompleteGroup) -> Key:
        """Lowest difficulty first."""
        return (group.difficulty, group.number)
