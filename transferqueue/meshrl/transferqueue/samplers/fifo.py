"""The group that was admitted first is taken first."""

from __future__ import annotations

from meshrl.transferqueue.sampling import OrderedSampler


class Sampler(OrderedSampler):
    """The default. With `max_staleness=0`, its batches depend on the feed alone."""
