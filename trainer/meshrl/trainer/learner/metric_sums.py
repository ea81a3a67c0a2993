"""Adds up the metrics of micro-batches and ranks: sums are added, means are weighted by their tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping

import numpy as np

from meshrl.trainer.ranks.world import World


class MetricSums:
    """Collects metrics of this rank's micro-batches."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}
        self._means: dict[str, list[float]] = {}

    def add_sums(self, values: Mapping[str, float]) -> None:
        """Values that add up over micro-batches."""
        for name, value in values.items():
            self._sums[name] = self._sums.get(name, 0.0) + value

    def add_means(self, values: Mapping[str, float], tokens: int) -> None:
        """Means over `tokens` tokens; means over 0 tokens are ignored."""
        for name, value in values.items() if tokens else ():
            total = self._means.setdefault(name, [0.0, 0.0])
            total[0] += value * tokens
            total[1] += tokens

    def over_ranks(self, world: World) -> dict[str, float]:
        """Sums over all ranks, and means over all their tokens. Every rank calls this and gets the same."""
        own = json.dumps([self._sums, self._means]).encode()
        totals: dict[str, list[float]] = {}
        for part in world.gather_shares(np.frombuffer(own, dtype=np.uint8)):
            sums, means = json.loads(part.tobytes())
            for name, value in sums.items():
                total = totals.setdefault(name, [0.0, 1.0])
                total[0] += value
            for name, (value, weight) in means.items():
                total = totals.setdefault(name, [0.0, 0.0])
                total[0] += value
                total[1] += weight
        return {name: value / weight for name, (value, weight) in totals.items()}
