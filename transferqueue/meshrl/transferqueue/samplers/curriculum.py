"""Easiest first: by the task's `extra_info["difficulty"]`, a number; without one a task counts as 0."""

from __future__ import annotations

from meshrl.transferqueue.model.ordered import Key
from meshrl.transferqueue.samplers._ordered import OrderedSampler
from meshrl.transferqueue.sampling import CompleteGroup


class Sampler(OrderedSampler):
    """Ties by admission. What is admitted, and so what is there to choose from, follows the order of the data."""

    def key(self, group: CompleteGroup) -> Key:
        """Lowest difficulty first."""
        return (group.difficulty, group.number)
