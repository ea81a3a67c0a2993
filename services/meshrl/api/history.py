"""What a run came to, read from its directory alone: while it runs, after its end, or in a copy."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

from meshrl.config.recipe import METRICS_NAME
from meshrl.contract.errors import MeshError
from meshrl.http.view.metrics import MetricCurve, MetricsFile
from meshrl.launcher.address_book import ADDRESS_BOOK_NAME, AddressBook, is_up
from meshrl.launcher.run_directory import FINISHED_NAME

STEP = "reward/mean"
"""A metric that each training step has."""
HELD_OUT = "val/score/mean"
TIME = "time/unix_s"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunHistory:
    """One run."""

    directory: Path
    name: str
    state: str
    """running, finished (it did all that its recipe asks for) or stopped."""
    metrics: MetricsFile

    @classmethod
    def read(cls, directory: Path) -> RunHistory:
        """The run in `directory`; a directory without a run has no steps and the directory's name."""
        metrics = MetricsFile(directory / METRICS_NAME)
        metrics.refresh()
        try:
            name = AddressBook.load(directory / ADDRESS_BOOK_NAME).run
        except MeshError:
            name = directory.name
        found = cls(directory=directory, name=name, state="running", metrics=metrics)
        if is_up(directory):
            return found
        finished = _finished_at(directory / FINISHED_NAME) == found.steps
        return replace(found, state="finished" if finished else "stopped")

    @property
    def steps(self) -> int:
        """Optimizer steps done."""
        curve = self._curve(STEP)
        return int(curve.steps[-1]) + 1 if curve else 0

    @property
    def ended_unix_s(self) -> float | None:
        """When it last did something; None before its first step."""
        return self.last(TIME)

    @property
    def seconds(self) -> float:
        """From its first figures to its last ones, pauses included."""
        times = self.values(TIME)
        return max(times) - min(times) if times else 0.0

    @property
    def samples(self) -> int:
        """Rows trained; about so many where metrics.jsonl has become too long to have every step."""
        rows = self.values("batch/rows")
        return round(sum(rows) / len(rows) * self.steps) if rows else 0

    def values(self, metric: str) -> list[float]:
        """Of one metric, in the order of its steps; empty where there is none."""
        curve = self._curve(metric)
        return curve.values if curve else []

    def last(self, metric: str) -> float | None:
        """The newest value."""
        return next(reversed(self.values(metric)), None)

    def _curve(self, metric: str) -> MetricCurve | None:
        return self.metrics.curves((metric,)).get(metric)


def _finished_at(note: Path) -> int | None:
    """The step at which the run had done all that it was asked to; None where it had not."""
    try:
        return int(json.loads(note.read_text())["step"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
