"""Training on pairs that are there: packs of whole pairs, one step, and the same numbers on held-out ones."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import torch

from meshrl.trainer.learner.metrics import MetricSums
from meshrl.trainer.learner.optimizer import Optimizers
from meshrl.trainer.model.packing import plan
from meshrl.trainer.ranks.world import World


class PairLearner(ABC):
    """What a loss over pairs needs around it. Every rank forwards its share of a batch."""

    def __init__(
        self,
        optimizers: Optimizers,
        world: World,
        *,
        lengths: Sequence[int],
        train: int,
        max_tokens: int,
    ) -> None:
        """Keep the parts.

        Args:
            optimizers: Of what learns.
            world: The ranks.
            lengths: Tokens of each pair.
            train: So many of the pairs are to train on; the others are held out.
            max_tokens: Of a pack.
        """
        self._optimizers = optimizers
        self._world = world
        self._lengths = lengths
        self._held_out = range(train, len(lengths))
        self._max_tokens = max_tokens

    def step(self, rows: Sequence[int], rate: float) -> dict[str, float]:
        """One optimizer step on the pairs `rows`."""
        tally = MetricSums()
        for chosen in self._shares(rows):
            loss = self._forward(chosen, len(rows), tally)
            loss.backward()  # type: ignore[no-untyped-call]
        norm = self._optimizers.step(rate)
        tokens = float(sum(self._lengths[row] for row in rows))
        return {**tally.over_ranks(self._world), "grad_norm": norm, "tokens": tokens}

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """The same numbers on held-out pairs."""
        if not self._held_out:
            return {}
        tally = MetricSums()
        for chosen in self._shares(self._held_out):
            self._forward(chosen, len(self._held_out), tally)
        return {f"val/{name}": value for name, value in tally.over_ranks(self._world).items()}

    def _shares(self, rows: Sequence[int]) -> Iterator[list[int]]:
        """The packs of this rank, pairs whole; empty ones keep ranks in step."""
        lengths = [self._lengths[row] for row in rows]
        packing = plan(lengths, ranks=self._world.size, max_tokens=self._max_tokens)
        for chosen in packing.ranks[self._world.rank]:
            yield [rows[index] for index in chosen]

    @abstractmethod
    def _forward(self, chosen: Sequence[int], total: int, tally: MetricSums) -> torch.Tensor:
        """The share of these pairs in the loss of a batch of `total` pairs, times the ranks."""
