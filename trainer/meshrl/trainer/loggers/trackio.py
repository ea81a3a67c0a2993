"""Trackio (https://huggingface.co/docs/trackio): local, unless TRACKIO_SPACE_ID names a space."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from meshrl.trainer.loggers._types import COLUMNS, LoggedRows, LoggedRun


class TrackioLogger:
    """One run, named as the experiment; a trainer that starts again continues in it."""

    def __init__(self, run: LoggedRun) -> None:
        import trackio

        self._trackio: Any = trackio
        self._run: Any = trackio.init(
            project=run.project,
            name=run.name,
            space_id=os.environ.get("TRACKIO_SPACE_ID"),
            config=dict(run.settings),
            resume="allow",
            embed=False,
        )

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Log the metrics of a step."""
        self._run.log(dict(values), step=step)

    def rows(self, step: int, rows: LoggedRows) -> None:
        """Log a table of samples, and a histogram of each column."""
        made = {
            f"histogram/{rows.split}/{name}": self._trackio.Histogram(values)
            for name, values in rows.histograms.items()
        }
        data = [list(row) for row in rows.samples]
        table = self._trackio.Table(columns=list(COLUMNS), data=data)
        self._run.log({**made, f"samples/{rows.split}": table}, step=step)

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


open_logger = TrackioLogger
