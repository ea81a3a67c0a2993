"""Prompts as endless streams: several data sets in shares (`data.weights`), levels that follow held-out scores.

    source a: pass 0, pass 1, ... ─┐
    source b: pass 0, pass 1, ... ─┴─ evenly interleaved by weight ──▶ epochs of as many prompts as there are rows

A source is walked through by itself, pass after pass, each in a seeded order: none of its prompts is asked again
before all the others were. Every place of the stream is a function of weights, seed and position, so a feeder that is
started again at its position continues where the killed one was.

With `data.reasoning_gym.curriculum` the level of each task is the source, and follows the held-out score:

    evaluator ── scores of each task by level ──▶ LevelHistory.after ──▶ cursor of the run <run>.eval
                                                                            │ run_state, before each chunk
    queue ◀── tasks, with the position in the cursor of <run> ── feeder ◀── LevelHistory.at ▶ LevelStream

Both cursors are stored by the queue with what they belong to, so a kill of trainer or feeder loses and repeats
nothing: an evaluation of a step that was decided before changes nothing, and a feeder starts from the prompts drawn
of each level and the levels that its unfinished chunk was begun with. What an evaluation of step e decides holds for
prompts that are asked two batches after those of step e. With `max_staleness: 0` that evaluation has ended by then,
so a seed repeats the run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from meshrl.contract.errors import UserError
from meshrl.contract.types import Json
from meshrl.trainer.data.prompts import Prompt
from meshrl.trainer.data.reasoning_gym import (
    ReasoningGymConfig,
    ReasoningGymCurriculumConfig,
    shares,
)


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
    """Prompts of an epoch from each data set in `weights`; `rows` are the prompts that each one has.

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
    # The k-th of n draws of a source is at (k + ½)/n.
    return [
        source
        for _, source in sorted(
            ((k + 0.5) / count, source) for source, count in enumerate(counts) for k in range(count)
        )
    ]


class MixedStream:
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


LEVEL: Final = "difficulty"
"""A row's level in `extra_info`."""
KEPT: Final = 64
"""Changes that are remembered: a feeder asks for one of the last few."""
LAG: Final = 2
"""Batches between the evaluated step and the first prompts that its scores decide about."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelHistory:
    """Which evaluations changed the levels, and to what."""

    step: int = -1
    """The last evaluation that was decided about."""
    changes: tuple[tuple[int, Mapping[str, int]], ...] = ()
    """Evaluated step and the levels of all tasks since; a task that is missing has level 0."""

    @property
    def levels(self) -> Mapping[str, int]:
        """The newest levels."""
        return self.changes[-1][1] if self.changes else {}

    def at(self, step: int) -> Mapping[str, int]:
        """The levels that evaluations of `step` and earlier ones made."""
        return next((levels for made, levels in reversed(self.changes) if made <= step), {})

    def after(
        self,
        step: int,
        scores: Mapping[tuple[str, int], float],
        config: ReasoningGymCurriculumConfig,
        levels: int,
    ) -> LevelHistory:
        """The history with the evaluation of `step`; unchanged where that step or a later one was decided before.

        Args:
            step: Step of the version that was evaluated.
            scores: Mean held-out score by task and level; a task without a score at its level keeps it.
            config: When a level rises.
            levels: How many there are.
        """
        if step <= self.step:
            return self
        now = dict(self.levels)
        for task in sorted({task for task, _ in scores}):
            level = self.levels.get(task, 0)
            score = scores.get((task, level))
            if score is not None and score >= config.raise_at:
                level = min(level + 1, levels - 1)
            now[task] = level
        changes = self.changes if now == self.levels else (*self.changes, (step, now))
        return LevelHistory(step=step, changes=changes[-KEPT:])

    def text(self) -> str:
        """The history as the queue keeps it."""
        return json.dumps({"step": self.step, "changes": self.changes})

    @classmethod
    def parse(cls, text: str) -> LevelHistory:
        """Parse a result of `text`; an empty history for the cursor of evaluations that decide about no level."""
        if not text.startswith("{"):
            return cls()
        stored = json.loads(text)
        return cls(
            step=stored["step"], changes=tuple((step, levels) for step, levels in stored["changes"])
        )


class LevelStream:
    """Prompts of each task's present level, tasks in the shares of their weights.

    A level's prompts come in a seeded order, none again before all the others of that level.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        gym: ReasoningGymConfig,
        *,
        evaluation: str,
        batch: int,
        seed: int,
    ) -> None:
        """Sort the prompts by task and level.

        Args:
            prompts: Those of `data.reasoning_gym`.
            gym: Tasks with weights, and levels.
            evaluation: The run whose cursor is the history.
            batch: Prompts of a training step.
            seed: Seed of the order.

        Raises:
            UserError: a level of a task has no prompt.
        """
        self.evaluation, self.batch = evaluation, batch
        self._names = sorted(gym.tasks)
        self._seed = seed
        self._top = gym.levels - 1
        self._pools: dict[tuple[str, int], list[int]] = {
            (name, level): [] for name in self._names for level in range(gym.levels)
        }
        for place, prompt in enumerate(prompts):
            self._pools[prompt.data_source, prompt.extra_info[LEVEL]].append(place)
        for (name, level), places in self._pools.items():
            if not places:
                raise UserError(
                    f"data.reasoning_gym: no prompt of {name} is left at level {level}: raise"
                    " data.max_prompt_length or data.reasoning_gym.size, or lower data.reasoning_gym.levels"
                )
        weights = [gym.tasks[name].weight for name in self._names]
        self._turns = interleaved(shares(weights, len(prompts)))
        self._drawn: dict[str, int] = {}
        self._levels: dict[str, int] = {}
        self._decided_at = -1
        self._orders: dict[tuple[str, int, int], list[int]] = {}

    def adopt(self, history: LevelHistory, position: int) -> bool:
        """Take the levels for the prompts from `position` on; False where they were decided before."""
        if self._decided_at == position:
            return False
        self._decided_at = position
        self._levels = dict(history.at((position - 1) // self.batch + 1 - LAG))
        return True

    def draw(self, position: int) -> tuple[int, int]:
        """The next prompt, which is the run's at `position`: the how-manieth pass over its level, and its place."""
        name = self._names[self._turns[position % len(self._turns)]]
        level = min(self._levels.get(name, 0), self._top)
        key = f"{name}/{level}"
        drawn = self._drawn.get(key, 0)
        self._drawn[key] = drawn + 1
        turn, at = divmod(drawn, len(self._pools[name, level]))
        return turn, self._order(name, level, turn)[at]

    def state(self) -> dict[str, Json]:
        """State for `restore`."""
        return {"drawn": self._drawn, "levels": self._levels, "decided_at": self._decided_at}

    def restore(self, state: Mapping[str, Json]) -> None:
        """Continue where `state` was asked for."""
        self._drawn, self._levels = dict(state["drawn"]), dict(state["levels"])
        self._decided_at = state["decided_at"]

    def _order(self, name: str, level: int, turn: int) -> list[int]:
        """The places of one pass over a level."""
        if (name, level, turn) not in self._orders:
            places = self._pools[name, level]
            seed = (self._seed, self._names.index(name), level, turn)
            order = np.random.default_rng(seed).permutation(len(places))
            self._orders = {k: v for k, v in self._orders.items() if k[:2] != (name, level)}
            self._orders[name, level, turn] = [places[at] for at in order]
        return self._orders[name, level, turn]


def level_scores(
    rows: Sequence[tuple[str, Json, float]],
) -> dict[tuple[str, int], float]:
    """Mean score by task and level of held-out rows, each its data source, `extra_info` and score."""
    found: dict[tuple[str, int], list[float]] = {}
    for source, extra_info, score in rows:
        level = extra_info.get(LEVEL)
        if isinstance(level, int):
            found.setdefault((source, level), []).append(score)
    return {key: sum(scores) / len(scores) for key, scores in found.items()}
