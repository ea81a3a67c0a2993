"""What a run came to, read from its directory alone: while it runs, after its end, or in a copy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from meshrl.cli.find_mesh import METRICS_NAME
from meshrl.contract.errors import MeshError
from meshrl.http.view.metrics import Curve, MetricsFile
from meshrl.launcher.address_book import ADDRESS_BOOK_NAME, AddressBook, is_up
from meshrl.launcher.run_directory import FINISHED_NAME

STEP = "reward/mean"
"""A metric that each training step has."""
HELD_OUT = "val/score/mean"
_READ = (
    *(STEP, HELD_OUT, "response/length_mean", "staleness/mean", "actor/entropy"),
    *("throughput/tokens_per_s", "batch/rows", "time/unix_s"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunHistory:
    """One run."""

    directory: Path
    name: str
    state: str
    """running, finished (it did all that its recipe asks for) or stopped."""
    curves: Mapping[str, Curve]

    @classmethod
    def read(cls, directory: Path) -> RunHistory:
        """The run in `directory`; a directory without a run has no steps and the directory's name."""
        metrics = MetricsFile(directory / METRICS_NAME)
        metrics.refresh()
        try:
            name = AddressBook.load(directory / ADDRESS_BOOK_NAME).run
        except MeshError:
            name = directory.name
        finished = (directory / FINISHED_NAME).exists()
        state = "running" if is_up(directory) else "finished" if finished else "stopped"
        return cls(directory=directory, name=name, state=state, curves=metrics.curves(_READ))

    @property
    def steps(self) -> int:
        """Optimizer steps done."""
        curve = self.curves.get(STEP)
        return int(curve.steps[-1]) + 1 if curve else 0

    @property
    def ended_unix_s(self) -> float | None:
        """When it last did something; None before its first step."""
        curve = self.curves.get("time/unix_s")
        return curve.values[-1] if curve else None

    @property
    def seconds(self) -> float:
        """From its first figures to its last ones, pauses included."""
        curve = self.curves.get("time/unix_s")
        return max(curve.values) - min(curve.values) if curve else 0.0

    def values(self, metric: str) -> list[float]:
        """Of one metric, in the order of its steps; empty where there is none."""
        curve = self.curves.get(metric)
        return list(curve.values) if curve else []

    def last(self, metric: str) -> float | None:
        """The newest value."""
        return next(reversed(self.values(metric)), None)
