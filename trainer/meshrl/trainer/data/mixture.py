"""Several data sets as one stream of prompts, in the shares that `data.weights` gives them.

    source a: pass 0, pass 1, ... ─┐
    source b: pass 0, pass 1, ... ─┴─ evenly interleaved by weight ──▶ epochs of as many prompts as there are rows

A source is walked through by itself, pass after pass, each in a seeded order: none of its prompts is asked again
before all the others were. Every place of the stream is a function of weights, seed and position, so a feeder that is
started again at its position goes on where the killed one was.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from meshrl.contract.errors import UserError
from meshrl.trainer.data.prompts import Prompt
from meshrl.trainer.data.reasoning_gym import shares


def source_of(where: str, data_source: str, weights: Mapping[str, float]) -> str:
    """The name in `weights` that a row falls under: its file (`where` is `file:row`), else its `data_source`.

    Raises:
        UserError: it has neither; names file and row.
    """
    file = where.rpartition(":")[0]
    name = next((name for name in weights if str(Path(name)) == file), data_source)
    if name not in weights:
        known = ", ".join(weights)
        raise UserError(
            f"{where}: data.weights has neither this file nor data_source {data_source!r} (it has {known})"
        )
    return name


def quotas(weights: Mapping[str, float], rows: Mapping[str, int]) -> dict[str, int]:
    """By the names in `weights`: how many prompts of an epoch are of it, where it has so many `rows`.

    Raises:
        UserError: one has no rows, or weighs so little that an epoch has none of it.
    """
    names, size = sorted(weights), sum(rows.values())
    counts = dict(zip(names, shares([weights[name] for name in names], size), strict=True))
    for name, count in counts.items():
        if not rows.get(name):
            raise UserError(
                f"data.weights: no prompt is of {name!r}; want files as in data.train_files or data sources of rows"
            )
        if not count:
            raise UserError(
                f"data.weights: {name!r} weighs so little that an epoch of {size} prompts has none of it"
            )
    return counts


def interleaved(counts: Sequence[int]) -> list[int]:
    """Each source as often as it counts, so that any stretch has the shares."""
    # The k-th of n draws of a source stands at (k + ½)/n.
    return [
        source
        for _, source in sorted(
            ((k + 0.5) / count, source) for source, count in enumerate(counts) for k in range(count)
        )
    ]


class Mixture:
    """The stream. A source is what `source_of` says."""

    def __init__(
        self, prompts: Sequence[Prompt], weights: Mapping[str, float], *, shuffle: bool, seed: int
    ) -> None:
        """Sort the prompts into sources.

        Raises:
            UserError: a prompt has no weight (names file and row), a weight has no prompts, or one is so small that
                an epoch asks none of its prompts.
        """
        by_name: dict[str, list[int]] = {name: [] for name in sorted(weights)}
        for place, prompt in enumerate(prompts):
            by_name[source_of(prompt.where, prompt.data_source, weights)].append(place)
        counts = quotas(weights, {name: len(places) for name, places in by_name.items()})
        self._places = list(by_name.values())
        self._counts = [counts[name] for name in by_name]
        """Prompts of each source in an epoch."""
        self._shuffle, self._seed = shuffle, seed

    def epoch(self, epoch: int) -> list[tuple[int, int]]:
        """Each draw of an epoch: which pass through its source it belongs to, and the prompt's place."""
        drawn = [epoch * count for count in self._counts]
        orders: dict[tuple[int, int], list[int]] = {}
        draws = []
        for source in interleaved(self._counts):
            turn, at = divmod(drawn[source], len(self._places[source]))
            drawn[source] += 1
            if (source, turn) not in orders:
                orders[source, turn] = self._order(source, turn)
            draws.append((turn, orders[source, turn][at]))
        return draws

    def _order(self, source: int, turn: int) -> list[int]:
        """The places of a source in one pass."""
        places = self._places[source]
        if not self._shuffle:
            return places
        order = np.random.default_rng((self._seed, source, turn)).permutation(len(places))
        return [places[at] for at in order]
