"""First admitted, first taken."""

from __future__ import annotations

from meshrl.transferqueue.samplers._ordered import OrderedSampler


class Sampler(OrderedSampler):
    """The default: with `max_staleness=0` it makes batches that depend on nothing but the feed."""
