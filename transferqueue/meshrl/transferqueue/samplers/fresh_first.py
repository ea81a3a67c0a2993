"""Groups of the newest policy first: least staleness, but old groups may grow too old."""

from __future__ import annotations

from meshrl.transferqueue.sampling import CompleteGroup, Key, OrderedSampler


class Sampler(OrderedSampler):
    """Orders by the oldest version that sampled a token of the group, newest first; ties by admission."""

    def key(self, group: CompleteGroup) -> Key:
        """The version, negated."""
        return (-group.oldest.epoch, -group.oldest.step, group.number)
